"""Measures what the time of steps goes to, without waiting for the device: events on its stream, read afterwards."""

import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from lightning.pytorch.profilers import Profiler

DATA, FORWARD_BACKWARD, OPTIMIZER, OTHER = "data", "forward_backward", "optimizer", "other"
PHASES = (DATA, FORWARD_BACKWARD, OPTIMIZER, OTHER)
_FETCH = "train_dataloader_next"  # how the training loop calls it in the profiler


class Clock:
    """Sums the time after each mark by what runs there.

    On CUDA a mark is an event: a phase lasts from when the device reaches its mark to when it reaches the next;
    data that come while it still works cost nothing. Elsewhere the host's clock counts.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []

    def mark(self, phase: str) -> None:
        """Begin ``phase``, and end the one before."""
        self._marks.append((phase, self._now()))

    def take(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call; the device must have reached the last mark."""
        sums: Counter[str] = Counter()
        for (phase, begin), (_, end) in pairwise(self._marks):
            sums[phase] += begin.elapsed_time(end) / 1e3 if self._is_cuda else end - begin
        self._marks = self._marks[-1:]
        return dict(sums)

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class _Listening(Profiler):
    """Stands before a trainer's profiler, and says when a batch is asked for."""

    def __init__(self, inner: Profiler, on_fetch: Callable[[], None]) -> None:
        super().__init__()
        self.inner, self._on_fetch = inner, on_fetch

    def start(self, action_name: str) -> None:
        """Pass the action on."""
        if action_name.endswith(_FETCH):
            self._on_fetch()
        self.inner.start(action_name)

    def stop(self, action_name: str) -> None:
        """Pass the action on."""
        self.inner.stop(action_name)

    def summary(self) -> str:
        """Return what the trainer's profiler says."""
        return self.inner.summary()


class FetchListener:
    """Calls a function before each training batch is fetched; there is no hook of callbacks there."""

    def __init__(self, on_fetch: Callable[[], None]) -> None:
        self._on_fetch = on_fetch
        self._installed: _Listening | None = None

    def install(self, trainer: Any) -> None:
        """Begin to listen."""
        self._installed = _Listening(trainer.profiler, self._on_fetch)
        trainer.profiler = self._installed

    def remove(self, trainer: Any) -> None:
        """Give the trainer back the profiler that it had; others may still listen."""
        mine, self._installed = self._installed, None
        if trainer.profiler is mine and mine is not None:
            trainer.profiler = mine.inner
        outer = trainer.profiler
        while isinstance(outer, _Listening):
            if outer.inner is mine and mine is not None:
                outer.inner = mine.inner
            outer = outer.inner
