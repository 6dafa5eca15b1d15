"""Finds paths that cannot be written before time is spent on what would be written there."""

from collections.abc import Iterator
from typing import Any

import lightning as L

from lightning_automodel.command.quiet import is_first_process
from lightning_automodel.pages import check_folder


def refuse_unwritable(trainer: L.Trainer, data: Any) -> None:
    """Tries the folders that a run will write to, in the first process of the run.

    Raises:
        ValueError: naming the setting, the folder and the reason.
    """
    if is_first_process():
        for setting, folder in _folders(trainer, data):
            check_folder(setting, folder)


def _folders(trainer: L.Trainer, data: Any) -> Iterator[tuple[str, Any]]:
    yield "--trainer.default_root_dir", trainer.default_root_dir
    for logger in trainer.loggers:
        yield f"save_dir of {type(logger).__name__}", getattr(logger, "save_dir", None)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        yield f"dirpath of {type(callback).__name__}", getattr(callback, "dirpath", None)
    yield "--data.cache_dir", getattr(data, "cache_dir", None)
