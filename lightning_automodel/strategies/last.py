"""What ``ckpt_path="last"`` means: the newest checkpoint that is complete.

Lightning looks for files called ``last``. A link of that name leads nowhere while what it names is written in the
background, or when the process ends between the removal of one checkpoint and the next link; then it would start anew.
"""

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path, PurePosixPath

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_automodel._compat.lightning import checkpoint_folder
from lightning_automodel.checkpointing.folder import METADATA
from lightning_automodel.checkpointing.storage import Location


def find_last(trainer: "pl.Trainer", found: str | Path | None) -> str | Path | None:
    """The path to start from.

    Args:
        trainer: whose ``ModelCheckpoint(save_last=...)`` say in which folders to look.
        found: what Lightning has found. It stands unless there is something newer.
    """
    times: dict[str, datetime] = {}
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.save_last and not callback.save_weights_only:
            folder = Location.of(checkpoint_folder(callback, trainer))
            times.update({str(path): time for path, time in _complete_ones(folder, callback.FILE_EXTENSION)})
    newest = max(times, key=times.__getitem__, default=None)
    time_found = None if found is None else _completed(Location.of(found))
    if newest is None or (time_found is not None and time_found >= times[newest]):
        return found
    return newest


def newest_beside(path: Location) -> Location | None:
    """The newest complete checkpoint in the folder of ``path`` that is not ``path`` itself, by whatever name."""
    itself = path.resolved()
    others = [(time, other) for other, time in _complete_ones(path.parent, PurePosixPath(path.name).suffix)]
    others = [(time, other) for time, other in others if not other.is_link() and other.resolved() != itself]
    return max(others, key=lambda pair: pair[0], default=(None, None))[1]


def _complete_ones(folder: Location, extension: str) -> Iterator[tuple[Location, datetime]]:
    for name in folder.names() if folder.is_folder() else []:
        time = _completed(folder / name) if name.endswith(extension) else None
        if time is not None:
            yield folder / name, time


def _completed(path: Location) -> datetime | None:
    """When the checkpoint was completed; ``None`` for what is none."""
    content = path / METADATA if path.is_folder() else path
    return content.modified() if content.is_file() else None
