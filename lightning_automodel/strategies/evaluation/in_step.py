"""Keeps data ranks together in an evaluation in which they have different numbers of batches.

FSDP2 gathers parameters over the data ranks in every forward pass, so a rank that has run out of batches goes on with
fillers: steps on its last batch that leave no trace. A loader of which four data ranks have 3, 2, 0 and 1 batches::

              round 1    round 2    round 3
    GPU 0     a0         a1         a2         next loader
    GPU 1     b0         b1         ~b1        next loader      ~b1: a filler, its last batch again
    GPU 2     ~a0        ~a0        ~a0        next loader      it has none: GPU 0, the first that has one, lends a0
    GPU 3     d0         ~d0        ~d0        next loader

For loaders of map-style data the number of rounds is known when they begin. For streams every round begins with a vote.
What one rank goes through with each loader (:class:`Rounds`)::

                    all tell lengths, and who has a batch
    last loader  ------------------------------------------>  entered
                                                                 |
            a batch of its own: record                           |  none (any more): advance
       +---------------------------------------------------------+--------------------+
       v                                                                              v
    round: its step  -- nobody has a round left: advance -->  next loader  <--  round: a filler
       |      ^                                                                |      ^
       +------+  one more batch                                                +------+  rounds are left

    In the first round of a loader of which some rank has no batch, the first one that has some lends its step.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.data import has_iterable_dataset, sized_len
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.distributed import ProcessGroup
from typing_extensions import override

from lightning_automodel._compat.lightning.evaluation_loops import (
    EvaluationLoop,
    PrefetchDataFetcher,
    end_loader,
    get_fetcher,
    is_sequential,
    set_fetcher,
)
from lightning_automodel.strategies.data.streams import FirstSamples, compared_streams, first_digest, unlike
from lightning_automodel.strategies.evaluation.combined import warn_of_unlike_shares
from lightning_automodel.strategies.evaluation.fillers import fresh_containers, run_filler

STREAM = -1  # in place of a loader's length
Step = tuple[str, tuple[Any, ...]]  # name of the strategy's hook, and its arguments


def disable_inference_mode(trainer: "pl.Trainer") -> None:
    """Evaluates under ``no_grad``: parameters that FSDP2 gathers in inference mode can never be trained again."""
    for loop in (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        loop.inference_mode = False


class EvenEvaluation:
    """Keeps one evaluation even, called by a strategy's hooks at its start and at each step."""

    def __init__(self) -> None:
        self.filling = False
        self.in_round = False
        """whether a step runs that may be a filler on other data ranks"""
        self._rounds: Rounds | None = None

    def start(self, trainer: "pl.Trainer", group: ProcessGroup, device: torch.device) -> None:
        """Takes over the loop's fetcher, unless there is one data rank, or the step fetches batches by itself."""
        self._rounds = None
        loop = active_loop(trainer)
        fetcher = get_fetcher(loop)
        if group.size() == 1 or not isinstance(fetcher, PrefetchDataFetcher):
            return
        combined = fetcher.combined_loader
        loaders = [[each] for each in combined.flattened] if is_sequential(combined) else [combined.flattened]
        assert trainer.state.stage is not None
        warn_of_unlike_shares(combined, group)
        self._rounds = Rounds(
            DataRanks(
                group,
                device,
                lambda i, ended: first_digest(loaders[i], ended),
                trainer.state.stage.value,
                lambda i: next(iter(compared_streams(loaders[i])), None),
            ),
            loader_lengths(combined),
            fill=lambda *args: self._fill(trainer, loop, *args),
            end=lambda loader: end_loader(loop, loader),
        )
        set_fetcher(loop, EvenFetcher.take_over(fetcher, self._rounds))

    @contextmanager
    def round(self, step: str, arguments: tuple[Any, ...]) -> Generator[None, None, None]:
        """Remembers a step, which runs within, as the next filler."""
        if self._rounds is not None and not self.filling:
            self._rounds.record(step, arguments)
        self.in_round = self._rounds is not None
        try:
            yield
        finally:
            self.in_round = False

    def _fill(
        self, trainer: "pl.Trainer", loop: EvaluationLoop, step: str, arguments: tuple[Any, ...], loader: int | None
    ) -> None:
        self.filling = True
        try:
            run_filler(trainer, loop, step, arguments, loader)
        finally:
            self.filling = False


class EvenFetcher(PrefetchDataFetcher):
    """Hands out the batches of a loader, and stays with it until no data rank has one left."""

    rounds: "Rounds"

    @classmethod
    def take_over(cls, fetcher: PrefetchDataFetcher, rounds: "Rounds") -> "EvenFetcher":
        """Makes a fetcher that goes on where ``fetcher`` is."""
        even = cls()
        vars(even).update(vars(fetcher))
        even.rounds = rounds
        return even

    @override
    def __next__(self) -> tuple[Any, int, int]:
        # The loop asks when it is through with a step, whatever has been fetched ahead.
        try:
            item = super().__next__()
        except StopIteration:
            self.rounds.advance(None)
            raise
        self.rounds.advance(item[2])
        return item


class DataRanks:
    """The other data ranks, as the protocol asks them; each method is collective.

    Args:
        group: the data ranks.
        device: that the group communicates on.
        first_sample: computes a digest of the first sample of a loader's stream, which may have ended; 0 if there is
            none.
        stage: named in errors.
        what_is_read: finds what the first sample of a loader is of.
    """

    def __init__(
        self,
        group: ProcessGroup,
        device: torch.device,
        first_sample: Callable[[int, bool], int],
        stage: str,
        what_is_read: Callable[[int], FirstSamples | None],
    ) -> None:
        self._group, self._device, self._first_sample, self._stage = group, device, first_sample, stage
        self._what_is_read = what_is_read

    @property
    def rank(self) -> int:
        """Return the place of this rank among them."""
        return self._group.rank()

    def gather(self, loader: int, length: int, has_batch: bool) -> tuple[list[int], list[int]]:
        """Tell the length of a loader and whether there is a batch of it; return those of all ranks, in order.

        Raises:
            ValueError: on every rank, if they read different streams.
        """
        first_sample = self._first_sample(loader, not has_batch)
        mine = torch.tensor([length, int(has_batch), first_sample], device=self._device)
        gathered = [torch.empty_like(mine) for _ in range(self._group.size())]
        dist.all_gather(gathered, mine, group=self._group)
        lengths, has, first_samples = torch.stack(gathered).T.tolist()
        if text := unlike(first_samples, self._group, 0, self._stage, self._what_is_read(loader)):
            raise ValueError(text)
        return lengths, has

    def any(self, active: bool) -> bool:
        """Ask whether any rank is active; one that is itself does not wait for the answer."""
        votes = torch.full((), int(active), device=self._device)  # not a copy from the host, which would wait
        dist.all_reduce(votes, group=self._group)
        return active or bool(votes)

    def lend(self, step: Step | None, lender: int) -> Step:
        """Send the step of the rank ``lender`` to all."""
        payload = [move_data_to_device(step, torch.device("cpu")) if lender == self.rank else None]
        dist.broadcast_object_list(payload, group=self._group, group_src=lender)
        return move_data_to_device(payload[0], self._device)


class Rounds:
    """The protocol: one round is one step on every data rank.

    Args:
        ranks: the data ranks.
        lengths: batches of each loader on this rank at most, or :data:`STREAM`.
        fill: runs a filler: name and arguments of the step, index of the loader (``None`` if there is one).
        end: tells the loop that a loader is through of which this rank has seen nothing.
    """

    def __init__(
        self,
        ranks: DataRanks,
        lengths: list[int],
        *,
        fill: Callable[[str, tuple[Any, ...], int | None], None],
        end: Callable[[int], None],
    ) -> None:
        self._ranks = ranks
        self._lengths = lengths
        self._fill_step = fill
        self._end_loader = end
        self._loader = -1
        self._rounds: int | None = 0  # of this loader; None: unknown
        self._done = 0
        self._lender: int | None = None  # rank of the group that lends its first batch of this loader, if need be
        self._step: Step | None = None

    def advance(self, loader: int | None) -> None:
        """Fills rounds until it is the turn of ``loader``, from which this rank's next batch comes, or of none."""
        count = len(self._lengths)
        target = count if loader is None else loader
        while self._loader < target:
            self._finish()
            self._loader += 1
            if self._loader < count:
                self._enter(has_batch=self._loader == target)
            if 0 < self._loader < target:  # after _enter: there a loop ends the loader that its batches come from
                self._end_loader(self._loader - 1)
        if loader is None:
            self._step = None

    def record(self, step: str, arguments: tuple[Any, ...]) -> None:
        """Begins a round with a batch of this rank, and lends it to ranks that have none of this loader.

        Not in ``advance``: in between the loop reduces what was logged under the last loader.
        """
        self._next_round(active=True)
        self._step = step, (fresh_containers(arguments[0]), *arguments[1:])
        self._exchange()

    def _enter(self, has_batch: bool) -> None:
        lengths, has = self._ranks.gather(self._loader, self._lengths[self._loader], has_batch)
        self._done = 0
        self._rounds = None if STREAM in lengths else max(lengths)
        if not any(has):
            self._rounds = 0
        self._lender = has.index(1) if 0 < sum(has) < len(has) else None

    def _finish(self) -> None:
        while self._next_round(active=False):
            self._step = self._exchange() or self._step
            assert self._step is not None
            self._fill_step(*self._step, self._loader if len(self._lengths) > 1 else None)

    def _next_round(self, active: bool) -> bool:
        """Agrees whether there is one more round. Ranks with a batch know, and do not wait for the answer."""
        self._done += 1
        if self._rounds is not None:
            return self._done <= self._rounds
        return self._ranks.any(active)

    def _exchange(self) -> Step | None:
        """Lends, once per loader of which some rank has no batch, the step of a rank that has one."""
        if self._lender is None:
            return None
        step, self._lender = self._ranks.lend(self._step, self._lender), None
        return step


def active_loop(trainer: "pl.Trainer") -> EvaluationLoop:
    """Returns the evaluation loop of the trainer's present stage."""
    if trainer.state.fn == TrainerFn.FITTING:
        return trainer.fit_loop.epoch_loop.val_loop
    if trainer.predicting:
        return trainer.predict_loop
    return trainer.test_loop if trainer.testing else trainer.validate_loop


def loader_lengths(loader: CombinedLoader) -> list[int]:
    """Count the batches of each loader at most, limits included; :data:`STREAM` where nobody can know."""
    if not is_sequential(loader):
        return [STREAM]
    limits = loader.limits or [float("inf")] * len(loader.flattened)
    return [_length(each, limit) for each, limit in zip(loader.flattened, limits, strict=True)]


def _length(loader: Any, limit: float) -> int:
    length = sized_len(loader)
    return STREAM if length is None or has_iterable_dataset(loader) else int(min(length, limit))
