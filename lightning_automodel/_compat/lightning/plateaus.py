"""Private names of Lightning: the numbers that callbacks and a ``ReduceLROnPlateau`` monitor, which its checkpoints do
not hold.
"""

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.trainer import Trainer
from lightning.pytorch.utilities.types import LRSchedulerConfig

from lightning_automodel._compat.lightning.end_of_batch import is_behind_batch


def plateaus(trainer: Trainer) -> list[LRSchedulerConfig]:
    """List the schedules that monitor a number, and that Lightning calls."""
    is_automatic = trainer.lightning_module.automatic_optimization
    return [config for config in trainer.lr_scheduler_configs if config.reduce_on_plateau and is_automatic]


def numbers_now(trainer: Trainer, *, may_wait: bool) -> dict[str, Any]:
    """Return what callbacks can monitor now; without ``may_wait`` what was there when somebody looked last, for ranks
    of which some may be gone.
    """
    return dict(trainer.callback_metrics if may_wait else trainer._logger_connector._callback_metrics)


def numbers_of_ended_epoch(trainer: Trainer) -> dict[str, Any]:
    """Return what is known of an epoch that ends, where Lightning has not yet called its plateaus: behind the last
    validation those of validation, behind the epoch all; within an epoch, or when it is over, nothing.
    """
    loop = trainer.fit_loop
    epoch: Any = loop.epoch_progress.current
    if not loop.epoch_loop.batch_progress.is_last_batch or epoch.completed >= epoch.ready:
        return {}
    if epoch.processed == epoch.ready:
        return dict(trainer.callback_metrics)
    found = trainer._logger_connector.metrics["callback"] if trainer.validating else {}
    return {**numbers_of_trained_epoch(trainer), **found} if found else {}


def numbers_of_trained_epoch(trainer: Trainer) -> dict[str, Any]:
    """Return what training has logged for an epoch, behind its last batch and in the validation there; else nothing."""
    loop = trainer.fit_loop.epoch_loop
    epoch: Any = trainer.fit_loop.epoch_progress.current
    is_through = trainer.validating or is_behind_batch(trainer)
    is_last = is_through and loop.batch_progress.is_last_batch and epoch.processed < epoch.ready
    return dict(loop._results.metrics(on_step=False)["callback"]) if is_last else {}


def ends_epoch_again(trainer: Trainer) -> bool:
    """Tell whether Lightning ends, when a run begins, the epoch that ended before: in a run that counts steps."""
    loop = trainer.fit_loop
    epoch: Any = loop.epoch_progress.current
    return loop.epoch_loop.batch_progress.is_last_batch and epoch.completed < epoch.ready


def set_numbers(trainer: Trainer, numbers: Mapping[str, Any]) -> None:
    """Let callbacks and schedules monitor ``numbers`` until others are logged."""
    tensors = {name: torch.tensor(value, dtype=_dtype_of(value)) for name, value in numbers.items()}
    trainer._logger_connector._callback_metrics.update(tensors)


def _dtype_of(value: float) -> torch.dtype:
    """Return what holds ``value``: most are logged in float32."""
    single = torch.tensor(value, dtype=torch.float32).item()
    return torch.float32 if single == value or value != value else torch.float64


def step_plateaus(trainer: Trainer) -> None:
    """Call the plateaus of the epoch that ended before a run begins."""
    loop = trainer.fit_loop
    epoch: Any = loop.epoch_progress.current
    epoch.completed -= 1  # frequencies count by the epoch that ended
    loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
    epoch.completed += 1


def before_epoch_ends(trainer: Trainer, numbers: Mapping[str, Any]) -> None:
    """Let Lightning call the plateaus behind the epoch in which a run goes on, where they find ``numbers``.

    It leaves them out there, since it does not know the numbers.
    """
    loop = trainer.fit_loop
    end = loop.on_advance_end

    def ended() -> None:
        vars(loop).pop("on_advance_end")
        loop._restarting = False
        set_numbers(trainer, numbers)
        end()

    vars(loop)["on_advance_end"] = ended
