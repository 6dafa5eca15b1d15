"""Finds paths that cannot be written before time is spent on what would be written there."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L

from lightning_automodel.command.quiet import is_first_process


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


def check_folder(setting: str, folder: str | Path | None) -> None:
    """Writes and removes a file in ``folder``, or in what is there of it. Passes URLs.

    Raises:
        ValueError: naming ``setting``, the folder and the reason.
    """
    if folder is None or "://" in str(folder):
        return
    path = Path(folder).expanduser().absolute()
    made: list[Path] = []
    try:
        for part in [*reversed(path.parents), path]:
            if not part.exists():
                part.mkdir()
                made.append(part)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ValueError(f"{setting}={folder}: nothing can be written there ({error.strerror})") from None
    finally:
        for part in reversed(made):
            _remove_if_empty(part)


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # another process writes there by now
        os.rmdir(folder)
