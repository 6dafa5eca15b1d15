"""Says which rank is gone when a collective fails.

A process that dies or cannot be reached shows on the others as an error of a backend ("Connection closed by peer") or
as a timeout, on each rank at a time of its own, and often because a rank in between has given up. So a thread of every
rank keeps two entries in the store over which the processes have met, and reads those of the others::

    place/RANK     host and process                                              once
    state/RANK     a number that grows, and in the end why this rank gave up     every second

A rank whose number stands still, and which has not said why, is gone.
"""

import json
import os
import socket
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import Store

from lightning_automodel._compat.torch.groups import address_of, open_store
from lightning_automodel.distributed.logs import logger
from lightning_automodel.strategies.faults.failures import describe_collective, is_of_backend

_BEAT = 1.0  # seconds
_READ_PER_SECOND = 64  # ranks: larger runs read less often, for the sake of the store
_SILENCE = 5.0  # seconds


class Peers:
    """Tells the other ranks how this process ends, and knows how they do."""

    def __init__(self) -> None:
        self._watch: _Watch | None = None
        self._runs = 0
        self._timeout: timedelta | None = None

    def start(self, timeout: timedelta | None) -> None:
        """Begins to watch; nothing happens in a run of one process. Every process of the run calls it.

        Args:
            timeout: of collectives, for messages.
        """
        if self._watch is not None or dist.get_world_size() == 1:
            return
        self._timeout = timeout
        self._runs += 1
        store = open_store(f"lightning_automodel/peers/{self._runs}")
        if store is not None:
            self._watch = _Watch(store, dist.get_rank(), dist.get_world_size())
            self._watch.start()

    def stop(self) -> None:
        """Ends the watch."""
        if self._watch is not None:
            self._watch.stop()
            self._watch = None

    def explain(self, error: BaseException) -> None:
        """Tells the other ranks of ``error``. If a collective raised it, its message says afterwards which, and which
        ranks are to blame: that takes the seconds in which a rank that lives shows it.
        """
        if self._watch is None or self._watch.has_given_up:
            return
        is_victim = is_of_backend(error)
        self._watch.give_up(f"{type(error).__name__}: {error}"[:500], is_victim)
        if is_victim:
            blame = self._blame(self._watch.settle())
            error.args = (f"{describe_collective(error)} failed: {blame}. The backend says: {error}",)

    def have_all_failed(self, error: BaseException) -> bool:
        """Tells whether all ranks have ended by an error of their own, and could still do something together."""
        self.explain(error)
        if self._watch is None:
            return True
        others = self._watch.settle()
        return not (is_of_backend(error) or others.gone or others.waiting)

    def _blame(self, others: "Others") -> str:
        assert self._watch is not None
        gone = f"{self._watch.name(others.gone)} gone: no sign of life for {self._watch.silence:g} s"
        failed = [f"{self._watch.name([rank])} the one that failed: {error}" for rank, error in others.failed.items()]
        if others.gone or failed:
            return "; ".join([*([gone] if others.gone else []), *failed])
        if not others.store_answers:
            return self._watch.describe_store()
        if others.waiting:
            return f"no rank is gone, but {_ranks(others.waiting)} did not come to it within timeout={self._timeout}"
        return f"no rank is gone; a connection was lost, or a rank was later than timeout={self._timeout}"


@dataclass
class Others:
    """The states of the other ranks.

    Attributes:
        gone: ranks that neither live nor have said why.
        failed: what ranks said that failed, and not because of others.
        waiting: ranks that live.
        store_answers: whether the store does.
    """

    gone: list[int] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)
    waiting: list[int] = field(default_factory=list)
    store_answers: bool = True


class _Watch:
    """Runs the thread that beats and looks. Nothing else asks the store, which may take any time to answer."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self.silence = max(_SILENCE, 3 * size / _READ_PER_SECOND)
        self._store, self._rank = store, rank
        self._ranks = [other for other in range(size) if other != rank]
        self._address = address_of(store)
        self._places: list[dict[str, Any]] = []
        self._others = Others(waiting=self._ranks)
        self._last_look = time.monotonic()
        self._last_word: dict[str, Any] = {}
        self._has_told = threading.Event()
        self._hurry, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="peers", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._hurry.set()
        self._thread.join(_SILENCE)

    @property
    def has_given_up(self) -> bool:
        return bool(self._last_word)

    def give_up(self, error: str, is_victim: bool) -> None:
        """Tells the others why; returns when the store knows it, or does not answer."""
        self._last_word = {"error": error, "victim": is_victim}
        self._hurry.set()
        self._has_told.wait(_SILENCE)

    def settle(self) -> Others:
        """Waits until all others have given up or been silent for long, or as much time has passed; returns their
        states.
        """
        end = time.monotonic() + self.silence + 2 * _BEAT
        while self._others.waiting and self._others.store_answers and time.monotonic() < end:
            time.sleep(0.1)
        known = self._others
        if time.monotonic() - self._last_look > self.silence:
            return Others(known.gone, known.failed, known.waiting, store_answers=False)
        return known

    # ---- words -------------------------------------------------------------------------------------------------------

    def name(self, ranks: list[int]) -> str:
        """Write ranks with their places, and a verb."""
        places = [self._places[rank] for rank in ranks] if self._places else []
        where = "; ".join(f"process {place['process']} on {place['host']}" for place in places)
        return f"{_ranks(ranks)} ({where}) {'is' if len(ranks) == 1 else 'are'}"

    def describe_store(self) -> str:
        """Says what it means that the store does not answer."""
        beside = [rank for rank in self._ranks if self._places and self._places[rank]["beside_store"]]
        host = "" if self._address is None else f" at {self._address[0]}:{self._address[1]}"
        who = f", so {self.name(beside)} gone or cut off" if beside else ""
        return f"the store of the run{host} does not answer{who}"

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._exchange_places()
            self._store.set_timeout(timedelta(seconds=_SILENCE))
            self._beat()
        except RuntimeError as error:
            if not self._stop.is_set():
                logger.debug("the store of the run does not answer: %s", error)
            known = self._others
            self._others = Others(known.gone, known.failed, known.waiting, store_answers=False)
            self._has_told.set()

    def _exchange_places(self) -> None:
        place = {"host": socket.gethostname(), "process": os.getpid(), "beside_store": _is_beside(self._address)}
        self._tell(0)
        self._store.set(f"place/{self._rank}", json.dumps(place))
        keys = [f"place/{rank}" for rank in range(len(self._ranks) + 1)]
        self._places = [json.loads(value) for value in self._store.multi_get(keys)]

    def _beat(self) -> None:
        count, next_look = 0, 0.0
        seen: dict[int, tuple[bytes, float]] = {}
        while not self._stop.is_set():
            count += 1
            self._tell(count)
            now = time.monotonic()
            if now >= next_look or self._hurry.is_set():
                self._look(seen)
                next_look = now + len(self._ranks) / _READ_PER_SECOND
            if self._hurry.is_set():
                self._stop.wait(_BEAT)
            else:
                self._hurry.wait(_BEAT)

    def _tell(self, count: int) -> None:
        word = self._last_word
        self._store.set(f"state/{self._rank}", json.dumps({"beat": count, **word}))
        if word:
            self._has_told.set()

    def _look(self, seen: dict[int, tuple[bytes, float]]) -> None:
        """Updates ``seen``: the last state of each rank, and since when it is that."""
        states = self._store.multi_get([f"state/{rank}" for rank in self._ranks])
        self._last_look = now = time.monotonic()
        others = Others()
        for rank, state in zip(self._ranks, states, strict=True):
            if rank not in seen or seen[rank][0] != state:
                seen[rank] = state, now
            content = json.loads(state)
            if "error" not in content:
                (others.gone if now - seen[rank][1] > self.silence else others.waiting).append(rank)
            elif not content["victim"]:
                others.failed[rank] = content["error"]
        new = [rank for rank in others.gone if rank not in self._others.gone]
        if new and not self._stop.is_set():
            logger.error("%s gone: no sign of life for %g s", self.name(new), self.silence)
        self._others = others


def _is_beside(address: tuple[str, int] | None) -> bool:
    """Tells whether this process runs on the host of the store: its own address, as seen from there, is the store's."""
    if address is None:
        return False
    family, kind, protocol, _, target = socket.getaddrinfo(*address, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # sends nothing
        return probe.getsockname()[0] == target[0]


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(str(rank) for rank in ranks)
