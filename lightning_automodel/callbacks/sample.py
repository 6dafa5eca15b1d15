"""Profiles single steps: how long they take, and how long a rank only waits for collectives in them.

A rank waits while a collective runs (a kernel of NCCL, a transfer of gloo) and none of its other operations does::

    operations    ====== ===      ====        ==
    collectives         =====  ======= ====
    waits                  -   --      ----
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from lightning_automodel._compat.torch.profiling import is_profiling

_COLLECTIVES = ("gloo:", "nccl")
Span = tuple[float, float]


@dataclass(frozen=True)
class StepSample:
    """What one step of this rank took, in seconds.

    Attributes:
        all: from its first batch being asked for to its end.
        waited: with a collective under way and nothing else.
    """

    all: float
    waited: float


class StepProfile:
    """A step that is being profiled; those who want the same step share it."""

    _running: "StepProfile | None" = None

    def __init__(self) -> None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        self._profile = profile(activities=activities)
        self._profile.start()
        self._sample: StepSample | None = None

    @classmethod
    def begin(cls) -> "StepProfile | None":
        """Begin, or join what has begun; ``None`` if somebody else profiles: torch has one profiler at a time."""
        if cls._running is None and not is_profiling():
            cls._running = cls()
        return cls._running

    @classmethod
    def abandon(cls) -> None:
        """End what has begun, without a result."""
        running, cls._running = cls._running, None
        if running is not None:
            running._profile.stop()

    def end(self) -> StepSample | None:
        """End, and return what was measured; ``None`` if it was abandoned."""
        if StepProfile._running is self:
            StepProfile._running = None
            self._profile.stop()
            self._sample = measure(self._profile.events() or [])
        return self._sample


def measure(events: Iterable[Any]) -> StepSample:
    """Measure a step from the events of torch's profiler."""
    events = [event for event in events if not _is_range(event)]
    on_device = any(_is_of_device(event) for event in events)
    relevant = [event for event in events if _is_of_device(event) == on_device]
    collectives = [_span(event) for event in relevant if _is_collective(event.name)]
    own = [_span(e) for e in relevant if not _is_collective(e.name) and (on_device or e.name.startswith("aten::"))]
    every = [_span(event) for event in events]
    begin, end = min((s[0] for s in every), default=0.0), max((s[1] for s in every), default=0.0)
    waited = _length([*collectives, *own]) - _length(own)
    return StepSample(all=(end - begin) / 1e6, waited=waited / 1e6)


def _is_of_device(event: Any) -> bool:
    return event.device_type == torch.autograd.DeviceType.CUDA


def _is_range(event: Any) -> bool:
    """Tell whether an event is no operation, but the time on the device of what FSDP2 or an optimizer has named: it
    spans the collectives that it holds, and what they wait for.
    """
    return _is_of_device(event) and event.is_user_annotation


def _is_collective(name: str) -> bool:
    return any(part in name for part in _COLLECTIVES)


def _span(event: Any) -> Span:
    return event.time_range.start, event.time_range.end


def _length(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in _merged(spans))


def _merged(spans: Iterable[Span]) -> Iterator[Span]:
    now: Span | None = None
    for begin, end in sorted(spans):
        if now is None:
            now = begin, end
        elif begin <= now[1]:
            now = now[0], max(now[1], end)
        else:
            yield now
            now = begin, end
    if now is not None:
        yield now
