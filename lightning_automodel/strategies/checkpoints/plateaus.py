"""What callbacks and a ``ReduceLROnPlateau`` monitor: a run that resumes goes on with the numbers and the updates.

Lightning calls a plateau behind the checkpoint of an epoch, and not at all behind the epoch in which a run resumes::

    last batch -> checkpoint -> validation -> checkpoint -> end of the epoch -> checkpoint -> plateaus
"""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerStatus
from torch import Tensor

from lightning_automodel._compat.lightning import plateaus
from lightning_automodel._compat.lightning.end_of_batch import is_behind_batch

MONITORED = "monitored_numbers"
"""Entry of a checkpoint."""


def monitored_numbers(trainer: "pl.Trainer") -> dict[str, Any]:
    """Make the entry of a checkpoint. Collective, but where an error ends a run."""
    may_wait = trainer.state.status != TrainerStatus.INTERRUPTED
    now = plateaus.numbers_now(trainer, may_wait=may_wait)
    ended = plateaus.numbers_of_ended_epoch(trainer) if may_wait else {}
    of_epoch = plateaus.numbers_of_trained_epoch(trainer) if may_wait else {}
    is_due = all(config.monitor in ended for config in plateaus.plateaus(trainer) if config.interval == "epoch")
    return {
        MONITORED: {
            "numbers": _as_numbers({**now, **ended}),
            "of_epoch": _as_numbers(of_epoch),
            "is_due": bool(ended) and is_due,
            "is_behind_batch": trainer.training and is_behind_batch(trainer),
        }
    }


def _as_numbers(values: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if not isinstance(value, Tensor) or value.numel() == 1}


def go_on_monitoring(trainer: "pl.Trainer", entry: dict[str, Any] | None) -> None:
    """Call the plateaus that were due when the checkpoint was saved, and let Lightning call them in the epoch that
    goes on. When training starts.
    """
    if entry is None:
        return
    numbers, schedules = entry["numbers"], plateaus.plateaus(trainer)
    if schedules and not entry.get("is_behind_batch") and plateaus.ends_epoch_again(trainer):
        if entry["is_due"]:  # the numbers not earlier, or plateaus that count steps would see them again
            plateaus.before_epoch_ends(trainer, numbers)
        return
    plateaus.set_numbers(trainer, numbers)
    if schedules and entry["is_due"]:
        plateaus.step_plateaus(trainer)
    plateaus.before_epoch_ends(trainer, entry.get("of_epoch", {}))
