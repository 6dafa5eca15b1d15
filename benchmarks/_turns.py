"""Loops and trainers that take steps in turn, in the same processes: a slower moment of the machine is everybody's."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.distributed as dist


class Turns:
    """The batches of one of them, each given when its turn comes; a step ends when the next batch is asked for.

    Args:
        batch: the only one.
        count: of steps.

    Attributes:
        seconds: of each step.
    """

    def __init__(self, batch: Any, count: int) -> None:
        self.batch, self.count = batch, count
        self.seconds: list[float] = []
        self.parked, self.may_go = threading.Semaphore(0), threading.Semaphore(0)
        self.error: BaseException | None = None

    def __len__(self) -> int:
        return self.count + 1  # nobody comes to an end, where a trainer takes down what others still use

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.parked.release()
            self.may_go.acquire()
            before = time.perf_counter()
            yield self.batch
            self.seconds.append(time.perf_counter() - before)

    def start(self, way: Callable[["Turns"], Any]) -> None:
        """Run ``way`` until it asks for its first batch."""
        threading.Thread(target=self._run, args=(way,), daemon=True).start()
        self._wait()

    def go(self) -> None:
        """Let it take a step."""
        self.may_go.release()
        self._wait()

    def _run(self, way: Callable[["Turns"], Any]) -> None:
        try:
            way(self)
        except BaseException as error:
            self.error = error
        self.parked.release()

    def _wait(self) -> None:
        self.parked.acquire()
        if self.error is not None:
            raise self.error


def in_turn(ways: Mapping[str, Callable[[Turns], Any]], batch: Any, count: int) -> dict[str, list[float]]:
    """Prepare one way after the other, each with a first step; return the seconds of those that they take in turn."""
    turns = {name: Turns(batch, count + 1) for name in ways}
    for name, way in ways.items():
        turns[name].start(way)
        turns[name].go()
    for _ in range(count):
        for each in turns.values():
            dist.barrier()
            each.go()
    return {name: each.seconds[1:] for name, each in turns.items()}
