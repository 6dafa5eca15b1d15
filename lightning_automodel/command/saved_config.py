"""Saves the settings of a run beside its logs."""

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback
from typing_extensions import override


class ConfigBesideLogs(SaveConfigCallback):
    """Saves ``config.yaml`` where a run has a folder of its own.

    Without a logger Lightning would write it into the working directory, over a file of the user's of this name.
    """

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.loggers:
            super().setup(trainer, pl_module, stage)
