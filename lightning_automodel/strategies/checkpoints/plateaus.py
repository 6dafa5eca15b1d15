"""What a ``ReduceLROnPlateau`` monitors: a run that resumes goes on with its numbers, and with its updates.

Lightning calls it behind the checkpoint of an epoch, and not at all behind the epoch in which a run resumes::

    last batch -> validation -> checkpoint -> end of the epoch -> checkpoint -> plateaus
"""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerStatus

from lightning_automodel._compat.lightning import plateaus

MONITORED = "monitored_numbers"
"""Entry of a checkpoint of a run with such a schedule."""


def monitored_numbers(trainer: "pl.Trainer") -> dict[str, Any]:
    """Make the entry of a checkpoint; none where no schedule monitors. Collective, but where an error ends a run."""
    schedules = plateaus.plateaus(trainer)
    if not schedules:
        return {}
    may_wait = trainer.state.status != TrainerStatus.INTERRUPTED
    names = {config.monitor for config in schedules}
    now = plateaus.numbers_now(trainer, may_wait=may_wait)
    ended = plateaus.numbers_of_ended_epoch(trainer) if may_wait else {}
    is_due = all(config.monitor in ended for config in schedules if config.interval == "epoch")
    numbers = {name: float(value) for name, value in {**now, **ended}.items() if name in names}
    return {MONITORED: {"numbers": numbers, "is_due": bool(ended) and is_due}}


def go_on_monitoring(trainer: "pl.Trainer", entry: dict[str, Any] | None) -> None:
    """Call the plateaus that were due when the checkpoint was saved, and let Lightning call them in the epoch that
    goes on. When training starts.
    """
    if entry is None:
        return
    numbers = entry["numbers"]
    if plateaus.ends_epoch_again(trainer):
        if entry["is_due"]:  # the numbers not earlier, or plateaus that count steps would see them again
            plateaus.before_epoch_ends(trainer, numbers)
        return
    plateaus.set_numbers(trainer, numbers)
    if entry["is_due"]:
        plateaus.step_plateaus(trainer)
    plateaus.before_epoch_ends(trainer, {})
