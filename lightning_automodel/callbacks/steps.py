"""Says how long a run is in optimizer steps, when one has ended, and who holds different data."""

import math

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.distributed import ProcessGroup


def steps_in_all(trainer: "pl.Trainer") -> float:
    """Count the optimizer steps of a run from its beginning to its end; ``inf`` where nothing says so."""
    bound = trainer.max_steps if trainer.max_steps >= 0 else math.inf
    module = trainer.lightning_module
    if module is None or not module.automatic_optimization:
        return bound
    try:
        return trainer.estimated_stepping_batches
    except MisconfigurationException:  # micro-batches per step that change from epoch to epoch
        return bound


def seconds_left(trainer: "pl.Trainer") -> float:
    """Return the seconds until ``max_time``, or the timer that ends first, stops the run; ``inf`` without one."""
    timers = [callback for callback in trainer.callbacks if isinstance(callback, Timer)]  # type: ignore[attr-defined]
    left = [seconds for timer in timers if (seconds := timer.time_remaining()) is not None]
    return max(0.0, min(left, default=math.inf))


def is_time_to_log(trainer: "pl.Trainer") -> bool:
    """Tell whether what the step that has just ended logs is written."""
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    return every > 0 and trainer.global_step % every == 0


class StepCounter:
    """Notices which batches end an optimizer step."""

    def __init__(self) -> None:
        self._seen = -1

    def start(self, trainer: "pl.Trainer") -> None:
        """Begin where the trainer is."""
        self._seen = trainer.global_step

    def has_stepped(self, trainer: "pl.Trainer") -> bool:
        """Tell whether there was a step since the last call."""
        before, self._seen = self._seen, trainer.global_step
        return before != self._seen


def data_group(trainer: "pl.Trainer") -> ProcessGroup | None:
    """Return the ranks whose data differ; ``None`` if there is only this one."""
    if trainer.world_size == 1 or not dist.is_initialized():
        return None
    strategy = trainer.strategy
    group = getattr(strategy, "data_group", None)
    if group is None and isinstance(strategy, ModelParallelStrategy):
        group = strategy.device_mesh["data_parallel"].get_group()
    group = dist.group.WORLD if group is None else group
    return group if group is not None and group.size() > 1 else None
