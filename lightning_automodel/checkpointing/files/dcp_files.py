"""The files of a checkpoint folder as torch's distributed checkpoint (DCP) wants to write and read them."""

import os
import pickle
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystemBase
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.storage import WriteResult
from torch.serialization import get_crc32_options, set_crc32_options

from lightning_automodel.checkpointing.files.integrity import SummingWriter, Sums, check_edition
from lightning_automodel.checkpointing.files.storage import Location

Complete = Callable[[Metadata, list[list[WriteResult]]], None]


class _Files(FileSystemBase):
    """A folder as DCP wants to see it; sums up what is written."""

    def __init__(self, root: Location) -> None:
        self.root = root
        self.sums: Sums = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[Any, None, None]:
        with self._at(path).named_in_errors(), self._at(path).open(mode) as file:
            if mode == "rb":
                yield file
                return
            writer = SummingWriter(file)
            yield writer
        self.sums[self._at(path).name] = (writer.size, writer.crc)

    def concat_path(self, path: Any, suffix: str) -> str:
        return (self._at(path) / suffix).path

    def rename(self, path: Any, new_path: Any) -> None:
        self._at(path).move_to(self._at(new_path))
        self.sums[self._at(new_path).name] = self.sums.pop(self._at(path).name)

    def init_path(self, path: Any) -> str:
        return os.fspath(path)

    def mkdir(self, path: Any) -> None:
        self._at(path).make_folder()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def exists(self, path: Any) -> bool:
        return self._at(path).exists()

    def rm_file(self, path: Any) -> None:
        self._at(path).remove()

    def _at(self, path: Any) -> Location:
        return Location(self.root.files, os.fspath(path), self.root.is_local)


class Writer(FileSystemWriter):
    """Writes one file per rank.

    Args:
        folder: to write.
        complete: called on the coordinator with torch's table and with what ranks have written, before it is written.
    """

    def __init__(self, folder: Location, complete: Complete) -> None:
        super().__init__(folder.path, single_file_per_rank=True, sync_files=folder.is_local)
        self.fs: Any = _Files(folder)
        self.path = folder.path
        self.complete = complete

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write torch's table, when it is complete."""
        self.complete(metadata, results)
        super().finish(metadata, results)

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        """Write what this rank holds."""
        with _without_inner_checksums():
            return super().write_data(*args, **kwargs)

    @property
    def sums(self) -> Sums:
        """Return sizes and checksums of what this rank has written."""
        return self.fs.sums


@contextmanager
def _without_inner_checksums() -> Generator[None, None, None]:
    """Leaves out the checksum of each tensor's archive, which costs a pass over memory and is never compared:
    ours are of whole files. The switch is this thread's.
    """
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


class Reader(FileSystemReader):
    """Reads DCP's own pickled table without the power to call functions that it names.

    Args:
        folder: to read.
        edition: that it must have until all is read.
    """

    def __init__(self, folder: Location, edition: int | None) -> None:
        super().__init__(folder.path)
        self.folder, self.edition = folder, edition
        self.fs: Any = _Files(folder)
        self.path = folder.path

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read torch's table."""
        with (self.folder / ".metadata").open("rb") as file:
            metadata = _TableUnpickler(file).load()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, *args: Any, **kwargs: Any) -> Any:
        """Read what the plan says, all of it from one edition of the folder.

        Raises:
            ValueError: if another process has put another checkpoint in its place.
        """
        try:
            return super().read_data(*args, **kwargs)
        finally:  # also in the place of an error that follows from it
            check_edition(self.folder, self.edition)


class _TableUnpickler(pickle.Unpickler):
    _METADATA = ("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata")
    _NAMES = (*_METADATA, "ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING", "_StorageInfo")
    _OTHERS = ("_get_layout", "Size", "PosixPath", "WindowsPath")
    _MODULES = ("torch", "torch.serialization", "torch.distributed.checkpoint", "pathlib")

    def find_class(self, module: str, name: str) -> Any:
        is_known = name in (*self._NAMES, *self._OTHERS) and module.startswith(self._MODULES)
        if is_known or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"the table of the checkpoint names {module}.{name}, which is no part of one")
