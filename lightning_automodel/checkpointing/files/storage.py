"""Reads and writes where checkpoints lie: a local path, or a URL of any file system that fsspec knows."""

import ctypes
import os
import shutil
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import IO, Any

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs


@dataclass(frozen=True)
class Location:
    """A file or folder. ``Location.of("runs/last.ckpt")``, ``Location.of("s3://bucket/last.ckpt")``.

    Attributes:
        files: the file system.
        path: the path in it, without a protocol.
        is_local: whether renaming a folder is one step that cannot be seen half done, as on local and network disks.
            Object stores copy one file after the other.
    """

    files: AbstractFileSystem
    path: str
    is_local: bool

    @staticmethod
    def of(path: "str | os.PathLike[str] | Location") -> "Location":
        """Parse a path or a URL.

        Raises:
            ValueError: for a protocol that fsspec does not know, or whose package is not installed.
        """
        if isinstance(path, Location):
            return path
        try:
            files, inner = url_to_fs(os.fspath(path))
        except (ValueError, ImportError) as error:
            raise ValueError(f"cannot reach {path}: {error}") from error
        return Location(files, inner, "file" in _protocols(files))

    def __str__(self) -> str:
        return self.path if self.is_local else self.files.unstrip_protocol(self.path)

    def __truediv__(self, name: str) -> "Location":
        return Location(self.files, f"{self.path.rstrip('/')}/{name}", self.is_local)

    @property
    def name(self) -> str:
        """Return the last part of the path."""
        return PurePosixPath(self.path).name

    @property
    def parent(self) -> "Location":
        """Return the folder that it lies in."""
        return Location(self.files, str(PurePosixPath(self.path).parent), self.is_local)

    @property
    def _fresh(self) -> AbstractFileSystem:
        """Return the file system, whose listings of folders that other processes write to are dropped first."""
        self.files.invalidate_cache()
        return self.files

    def exists(self) -> bool:
        """Tells whether there is something, be it a link that leads nowhere."""
        return self.is_link() or self._fresh.exists(self.path)

    def is_folder(self) -> bool:
        """Tells whether it is a folder, or a link to one."""
        return self._fresh.isdir(self.path)

    def is_file(self) -> bool:
        """Tells whether it is a file, or a link to one."""
        return self._fresh.isfile(self.path)

    def is_link(self) -> bool:
        """Tells whether it is a link, which only local file systems have."""
        return self.is_local and Path(self.path).is_symlink()

    def size(self) -> int:
        """Returns the size in bytes."""
        return int(self.files.size(self.path))

    def modified(self) -> datetime:
        """Returns when the file, or what a link leads to, was written last."""
        return self.files.modified(self.resolved())

    def resolved(self) -> str:
        """Returns the path without links."""
        return os.path.realpath(self.path) if self.is_local else self.path

    def names(self) -> list[str]:
        """Lists what a folder holds."""
        return sorted(PurePosixPath(entry).name for entry in self._fresh.ls(self.path, detail=False))

    def open(self, mode: str) -> IO[Any]:
        """Opens a binary stream; ``mode`` is "rb" or "wb"."""
        return Path(self.path).open(mode) if self.is_local else self.files.open(self.path, mode)

    @contextmanager
    def named_in_errors(self) -> Generator[None, None, None]:
        """Name this file in errors of the disk within this context; the system does not for writes."""
        try:
            yield
        except OSError as error:
            if error.errno is None or error.filename is not None:
                raise
            raise OSError(error.errno, error.strerror, str(self)) from error

    def write(self, content: bytes) -> None:
        """Overwrites the file, and returns when it is on the disk."""
        with self.named_in_errors(), self.open("wb") as file:
            file.write(content)
            if self.is_local:
                file.flush()
                os.fsync(file.fileno())

    def read(self) -> bytes:
        """Reads the whole file."""
        with self.open("rb") as file:
            return file.read()

    def make_folder(self) -> None:
        """Makes a folder with its parents; it may exist."""
        self.files.makedirs(self.path, exist_ok=True)

    def remove(self) -> None:
        """Deletes a file, a link or a folder with all that it holds; what is not there is no error."""
        if self.is_link():
            Path(self.path).unlink()
        elif self.is_local and Path(self.path).is_dir():
            while Path(self.path).is_dir():
                with suppress(FileNotFoundError):  # another run deletes the same
                    shutil.rmtree(self.path)
        elif self._fresh.exists(self.path):
            self.files.rm(self.path, recursive=True)

    def move_to(self, target: "Location", last: str | None = None) -> None:
        """Renames it. ``target`` must not exist. Where files are copied one by one, ``last`` names the last of them."""
        if self.is_local:
            Path(self.path).rename(target.path)
            _sync_folder(Path(target.path).parent)
            return
        for path in sorted(self._fresh.find(self.path), key=lambda path: PurePosixPath(path).name == last):
            self.files.cp_file(path, f"{target.path}{path.removeprefix(self.path)}")
        self.remove()

    def replace(self, target: "Location") -> None:
        """Gives a local file the name of ``target``, a file or link if it exists, in one step."""
        Path(self.path).replace(target.path)
        _sync_folder(Path(target.path).parent)

    def sync(self) -> None:
        """Returns when a local file is on the disk."""
        with self.named_in_errors(), self.open("rb") as file:
            os.fsync(file.fileno())

    def swap(self, other: "Location") -> bool:
        """Exchanges two names in one step, between which neither is missing. Not all file systems can: returns whether
        it was done.
        """
        if not self.is_local or _rename is None:
            return False
        paths = os.fsencode(self.path), os.fsencode(other.path)
        if _rename(_HERE, paths[0], _HERE, paths[1], _EXCHANGE) != 0:
            return False
        _sync_folder(Path(other.path).parent)
        return True


_HERE, _EXCHANGE = -100, 2  # AT_FDCWD, RENAME_EXCHANGE of <fcntl.h> and <linux/fs.h>
_rename = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform == "linux" else None


def _protocols(files: AbstractFileSystem) -> tuple[str, ...]:
    return (files.protocol,) if isinstance(files.protocol, str) else tuple(files.protocol)


def _sync_folder(folder: Path) -> None:
    """Writes a folder to disk, so that a new name in it survives a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
