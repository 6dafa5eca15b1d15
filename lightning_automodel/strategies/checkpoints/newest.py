"""Finds what ``ckpt_path="last"`` means: the newest checkpoint that is complete.

Lightning looks for files called ``last``. A link of that name leads nowhere while what it names is written in the
background, or when the process ends between the removal of one checkpoint and the next link; then it would start anew.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_automodel._compat.lightning.trainer import (
    checkpoint_folder,
    checkpoint_path_of,
    replace_checkpoint_path,
    starts_from_last,
)
from lightning_automodel.checkpointing.files.folder import METADATA
from lightning_automodel.checkpointing.files.integrity import verify
from lightning_automodel.checkpointing.files.storage import Location
from lightning_automodel.distributed.logs import warn_once

Complete = tuple[Location, datetime]
"""A checkpoint, and when it was completed."""


def find_last(trainer: "pl.Trainer", found: str | Path | None) -> str | Path | None:
    """Finds the path to start from.

    Args:
        trainer: whose ``ModelCheckpoint(save_last=...)`` say in which folders to look.
        found: what Lightning has found. It stands unless there is something newer.
    """
    newest, time = _newest(
        one
        for saver, folder in _savers(trainer)
        if saver.save_last
        for one in _complete_ones(folder, saver.FILE_EXTENSION)
    )
    if newest is None and found is None:
        _tell_of_others(trainer)
    time_found = None if found is None else _completed(Location.of(found))
    if newest is None or time is None or (time_found is not None and time_found >= time):
        return found
    return str(newest)


def _tell_of_others(trainer: "pl.Trainer") -> None:
    """Warn where ``"last"`` is no checkpoint, but there are some: loggers name a new folder for each run."""
    found: list[Complete] = []
    for saver, folder in _savers(trainer):
        places = [folder] if saver.dirpath else [run / folder.name for run in _folders(folder.parent.parent)]
        found += (one for place in places for one in _complete_ones(place, saver.FILE_EXTENSION))
    newest, _ = _newest(one for one in found if not one[0].is_link())
    if newest is not None:
        warn_once(
            f'ckpt_path="last" finds no checkpoint, and training begins anew; the newest of earlier runs is {newest}. '
            'Pass that path to go on from it; "last" is what ModelCheckpoint(dirpath=..., save_last="link") saves in a '
            "folder that stays the same"
        )


def _folders(folder: Location) -> list[Location]:
    return [folder / name for name in folder.names()] if folder.is_folder() else []


def newest_of(trainer: "pl.Trainer") -> str | None:
    """Find the newest complete checkpoint that a fit of ``trainer`` can go on from, by any name."""
    found = (one for saver, folder in _savers(trainer) for one in _complete_ones(folder, saver.FILE_EXTENSION))
    newest, _ = _newest(one for one in found if not one[0].is_link())
    return None if newest is None else str(newest)


def _savers(trainer: "pl.Trainer") -> Iterator[tuple[ModelCheckpoint, Location]]:
    """Yield who saves what a fit can go on from, and into which folder."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and not callback.save_weights_only:
            yield callback, Location.of(checkpoint_folder(callback, trainer))


def _newest(found: Iterable[Complete]) -> Complete | tuple[None, None]:
    return max(found, key=lambda pair: pair[1], default=(None, None))


class Replacement:
    """The checkpoint that a run starts from in place of a damaged one, if it was asked for the last."""

    def __init__(self) -> None:
        self._sound: dict[str, Location] = {}

    def find(self, trainer: "pl.Trainer", broadcast: Callable[[Any], Any]) -> None:
        """Looks for a sound checkpoint, before anything is read of the one that was chosen. Collective.

        Args:
            trainer: whose call has chosen.
            broadcast: gives every rank what rank 0 has.

        Raises:
            ValueError: if all are damaged.
        """
        path = checkpoint_path_of(trainer)
        if path is not None and starts_from_last(trainer) and Location.of(path).exists():
            self._sound[str(path)] = sound = newest_sound(Location.of(path), broadcast)
            replace_checkpoint_path(trainer, str(sound))

    def get(self, path: Location) -> tuple[Location, bool]:
        """Return what to read for ``path``, and whether it is known to be sound."""
        return self._sound.get(str(path), path), str(path) in self._sound


def newest_sound(path: Location, broadcast: Callable[[Any], Any]) -> Location:
    """Return ``path``, or the newest complete checkpoint beside it that is not damaged, with a warning. Collective.

    Raises:
        ValueError: if there is none.
    """
    candidate = Location.of(path.resolved()) if path.is_link() else path
    try:
        verify(candidate)
    except ValueError as error:
        other = sound_beside(path, broadcast)
        if other is None:
            raise
        warn_once(f"{str(error).partition('. Nothing')[0]}; ckpt_path='last' goes on from {other}, which is older")
        return other
    return candidate


def sound_beside(path: Location, broadcast: Callable[[Any], Any]) -> Location | None:
    """Find the newest complete checkpoint in the folder of ``path`` that is another one and not damaged. Collective.

    Args:
        path: of a checkpoint that is damaged.
        broadcast: gives every rank what rank 0 has.
    """
    damaged: list[Location] = []
    while (other := broadcast(_newest_beside(path, damaged))) is not None:
        try:
            verify(other)
        except ValueError:
            damaged.append(other)
        else:
            break
    return other


def _newest_beside(path: Location, others: Sequence[Location]) -> Location | None:
    known = {each.resolved() for each in (path, *others)}
    found = _complete_ones(path.parent, PurePosixPath(path.name).suffix)
    return _newest(one for one in found if not one[0].is_link() and one[0].resolved() not in known)[0]


def _complete_ones(folder: Location, extension: str) -> Iterator[Complete]:
    for name in folder.names() if folder.is_folder() else []:
        time = _completed(folder / name) if name.endswith(extension) else None
        if time is not None:
            yield folder / name, time


def _completed(path: Location) -> datetime | None:
    """Returns when the checkpoint was completed; ``None`` for what is none."""
    content = path / METADATA if path.is_folder() else path
    return content.modified() if content.is_file() else None
