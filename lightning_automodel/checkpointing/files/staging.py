"""Writes a folder that appears under its name when it is complete, and not before.

::

    FOLDER/.incomplete/NAME.ckpt    while it is written; locked by the process that writes
    FOLDER/NAME.ckpt                renamed when complete; what was there before takes the other name

What a process that died has left in ``.incomplete`` is deleted by the next save into FOLDER: its lock is free. Two runs
may save into one FOLDER, by other names.
"""

import fcntl
import os
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import IO, Any

from lightning_automodel.checkpointing.files.storage import Location

_INCOMPLETE = ".incomplete"
_LOCK = ".lock"
_PATIENCE = 10.0  # seconds; data loader workers hold the lock of a process that died until they see it, in 5


class Staging:
    """Builds the folder ``target`` beside its place, and publishes it when complete. For one process of a run.

    Attributes:
        folder: where to write.
    """

    def __init__(self, target: Location) -> None:
        self.target = target
        self.folder = target.parent / _INCOMPLETE / target.name
        self._lock: IO[Any] | None = None

    def begin(self) -> None:
        """Makes an empty folder, and deletes what dead processes left beside it.

        Raises:
            ValueError: if a living process writes a checkpoint of this name, whose parts would be mixed with ours.
        """
        with suppress(FileNotFoundError, FileExistsError):  # another run deletes what is empty; it is made again below
            self.folder.parent.make_folder()
        while not self._has_begun():
            _wait_for_other_writers(self.folder, self.target)

    def _has_begun(self) -> bool:
        """Make the folder, unless another process writes there: two may have waited for a third."""
        with _others_waiting(self.target.parent):
            if _is_held(self.folder):
                return False
            _delete_leftovers(self.folder.parent)
            self.folder.remove()
            self.folder.make_folder()
            self._lock = _lock(self.folder)
        return True

    def publish(self, last: str) -> None:
        """Gives the folder its name. What had the name before is deleted afterwards.

        Args:
            last: name of the file that makes it complete, for object stores, which have no names of folders to change.
        """
        with _others_waiting(self.target.parent):
            if self.target.exists() and self.folder.swap(self.target):
                self.folder.remove()
            else:
                aside = _set_aside(self.target) if self.target.exists() else None
                self.folder.move_to(self.target, last)
                if aside is not None:
                    aside.remove()
            (self.target / _LOCK).remove()
            self._unlock()
            _remove_if_empty(self.folder.parent)

    def publish_file(self, file: Location) -> None:
        """Gives the name to a file in the folder, and deletes the rest. What had the name before is replaced."""
        file.sync()
        if self.target.is_folder() and not self.target.is_link():
            remove_checkpoint(self.target)
        file.replace(self.target)
        with _others_waiting(self.target.parent):
            self._unlock()
            self.folder.remove()
            _remove_if_empty(self.folder.parent)

    def abandon(self) -> None:
        """Gives up; the next save deletes what is there."""
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # processes forked meanwhile hold it, too
            self._lock.close()
            self._lock = None


def remove_checkpoint(path: Location) -> None:
    """Deletes a checkpoint so that no part of it is left under its name, whenever the process ends."""
    if path.is_link() or not path.is_folder():
        path.remove()
    else:
        with _others_waiting(path.parent):
            if not path.exists():  # another run has deleted the same
                return
            aside = _set_aside(path)
            aside.remove()
            _remove_if_empty(aside.parent)


@contextmanager
def _others_waiting(folder: Location) -> Generator[None, None, None]:
    """Keep other runs from making and deleting what lies in ``folder/.incomplete``, within this context.

    A run deletes what no process has locked, and a folder has no lock yet when it is made. Where folders cannot be
    locked, nobody waits.
    """
    if not folder.is_local:
        yield
        return
    descriptor = os.open(folder.path, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # processes forked meanwhile hold it, too
        os.close(descriptor)


def _set_aside(path: Location) -> Location:
    aside = path.parent / _INCOMPLETE / f"{path.name}.removed"
    aside.remove()
    aside.parent.make_folder()
    path.move_to(aside)
    return aside


def _lock(folder: Location) -> IO[Any] | None:
    """Opens a file that is locked until it is closed or its process ends; ``None`` where files cannot be locked.

    Raises:
        BlockingIOError: if another process holds the lock.
    """
    if not folder.is_local:
        return None
    file = (folder / _LOCK).open("wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if isinstance(error, BlockingIOError):
            raise
        return None
    return file


def _wait_for_other_writers(folder: Location, target: Location) -> None:
    deadline = time.monotonic() + _PATIENCE
    while _is_held(folder):
        if time.monotonic() > deadline:
            raise ValueError(
                f"{target} is being written by another process; two runs cannot save checkpoints of the same name into "
                "one folder: give each its own (dirpath of ModelCheckpoint)"
            )
        time.sleep(0.1)


def _is_held(folder: Location) -> bool | None:
    """Tell whether another process writes there; ``None`` where files cannot be locked, so that nobody knows."""
    if not (folder.is_local and (folder / _LOCK).is_file()):
        return False
    try:
        file = _lock(folder)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    if file is None:
        return None
    file.close()
    return False


def _delete_leftovers(folder: Location) -> None:
    if not (folder.is_local and folder.is_folder()):
        return
    for name in folder.names():
        leftover = folder / name
        if _is_held(leftover) is False:
            leftover.remove()


def _remove_if_empty(folder: Location) -> None:
    if folder.exists() and not folder.names():
        folder.remove()
