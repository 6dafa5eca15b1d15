"""Tells torch's distributed checkpoint (DCP) what each rank holds of a tensor, and reads without running pickled code.

DCP's own planners describe a rank's part of a DTensor as one box, at offsets that can be wrong (see ``shards``).
"""

import io
import os
import pickle
import warnings
import zlib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystemBase
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.serialization import get_crc32_options, set_crc32_options

from lightning_automodel.checkpointing.integrity import SummingWriter, Sums
from lightning_automodel.checkpointing.storage import Location
from lightning_automodel.checkpointing.unread import ReadWhenUsed
from lightning_automodel.distributed.boxes import Box
from lightning_automodel.distributed.shards import boxes_of, copy_from_whole, local_tensor, place_among_replicas

Tree = dict[str, Any]


@dataclass(frozen=True, eq=False)
class StoredTensor(ReadWhenUsed):
    """A tensor in a checkpoint folder that has not been read."""

    folder: Location
    key: str
    shape: torch.Size
    dtype: torch.dtype

    def load(self) -> Tensor:
        """Reads the whole tensor to the CPU, on each rank that calls."""
        tensor = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        _load_alone({self.key: tensor}, self.folder, _BoxReader())
        return tensor


@dataclass(frozen=True, eq=False)
class Held:
    """What this rank writes of a tensor.

    Attributes:
        local: the memory that it holds.
        shape: of the whole tensor.
        boxes: where the memory lies in the whole tensor; none if another rank writes the same.
    """

    local: Tensor
    shape: torch.Size
    boxes: list[Box]

    @staticmethod
    def of(tensor: Tensor, key: str) -> "Held":
        """Describes what this rank holds of ``tensor``, without a copy; ``key`` chooses the writer among replicas."""
        copies, index = place_among_replicas(tensor)
        is_writer = zlib.crc32(key.encode()) % copies == index
        local = local_tensor(tensor)
        return Held(local if is_writer else local.new_empty(0), tensor.shape, boxes_of(tensor) if is_writer else [])


def write_tensors(tree: Mapping[str, Any], folder: Location, group: ProcessGroup | None = None) -> Sums:
    """Writes a tree of ``Held``. Collective over ``group`` (default: all).

    Returns:
        sizes and checksums of the files that this rank wrote.

    Raises:
        RuntimeError: on every rank, with what went wrong on which.
    """
    writer = _Writer(folder)
    with _ordinary_errors():
        dcp.save(dict(tree), storage_writer=writer, planner=_BoxWriter(), process_group=group)
    return writer.sums


@contextmanager
def _ordinary_errors() -> Generator[None, None, None]:
    """Raises DCP's exception, which is no ``Exception``, as one that callers and threads can handle."""
    try:
        yield
    except dcp.CheckpointException as error:
        causes = [f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in error.failures.items()]
        raise RuntimeError("; ".join(causes)) from error


def list_tensors(folder: Location, weights_only: bool | None) -> Tree:
    """Reads the tree that was written, with a :class:`StoredTensor` for each tensor.

    Raises:
        pickle.UnpicklingError: if an object needs ``weights_only=False``.
    """
    metadata = _Reader(folder).read_metadata()
    table = metadata.state_dict_metadata
    objects = [key for key, stored in table.items() if not isinstance(stored, TensorStorageMetadata)]
    values = _read_objects(folder, objects, weights_only)
    tree: Tree = {}
    for key, stored in table.items():
        *parents, last = (metadata.planner_data or {}).get(key, (key,))
        node: dict = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        if isinstance(stored, TensorStorageMetadata):
            node[last] = StoredTensor(folder, key, stored.size, stored.properties.dtype)
        else:
            node[last] = values[key]
    return _with_lists(tree)


def fetch(pairs: list[tuple[Tensor, StoredTensor | Tensor]]) -> None:
    """Overwrites what this rank holds of each first tensor with its part of the second, converting dtypes. Collective.

    Raises:
        ValueError: if the shapes of a pair differ.
    """
    waiting: list[tuple[Tensor, StoredTensor]] = []
    for target, source in pairs:
        if isinstance(source, Tensor):
            copy_from_whole(target, source)
        else:
            waiting.append((target, source))
    while waiting:  # a pass serves one target of each stored tensor
        turn = {source: target for target, source in waiting}
        for folder in sorted({source.folder for source in turn}, key=str):
            wanted = {source.key: target for source, target in turn.items() if source.folder == folder}
            with _ordinary_errors():
                dcp.load(wanted, storage_reader=_Reader(folder), planner=_BoxReader())
        waiting = [(target, source) for target, source in waiting if turn[source] is not target]


def _read_objects(folder: Location, keys: list[str], weights_only: bool | None) -> Tree:
    values: Tree = dict.fromkeys(keys)
    if keys:
        _load_alone(values, folder, _ObjectReader(weights_only))
    return values


def _load_alone(values: Tree, folder: Location, planner: DefaultLoadPlanner) -> None:
    """Loads on this rank only, without DCP's warning about that."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(values, storage_reader=_Reader(folder), planner=planner, no_dist=True)


def _with_lists(tree: Any) -> Any:
    """Turns dicts with the keys 0, 1, ... back into lists, whose elements DCP names by number."""
    if not isinstance(tree, dict):
        return tree
    values = {key: _with_lists(value) for key, value in tree.items()}
    is_list = bool(values) and all(isinstance(key, int) for key in values)
    return [values[i] for i in range(len(values))] if is_list else values


# ---- plans -----------------------------------------------------------------------------------------------------------


class _BoxWriter(DefaultSavePlanner):
    """Writes each box that this rank holds."""

    def create_local_plan(self) -> SavePlan:
        items = [_write_item(key, held, box) for key, held in self.state_dict.items() for box in held.boxes]
        self.plan = SavePlan(items, planner_data=self.mappings)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        held = self.state_dict[index.fqn]
        return _box_at(held.boxes, index).of_local(held.local)


class _BoxReader(DefaultLoadPlanner):
    """Reads each box that this rank holds."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items: list[ReadItem] = []
        for key, tensor in self.state_dict.items():
            stored = self.metadata.state_dict_metadata[key]
            assert isinstance(stored, TensorStorageMetadata)
            if stored.size != tensor.shape:
                raise ValueError(f"{key} is stored as {tuple(stored.size)}, but {tuple(tensor.shape)} is needed")
            items += create_read_items_for_chunk_list(key, stored, [_chunk(box) for box in boxes_of(tensor)])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        tensor = self.state_dict[index.fqn]
        return _box_at(boxes_of(tensor), index).of_local(local_tensor(tensor))


class _ObjectReader(DefaultLoadPlanner):
    def __init__(self, weights_only: bool | None) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.weights_only = weights_only

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=self.weights_only)


def _write_item(key: str, held: Held, box: Box) -> WriteItem:
    properties = TensorProperties.create_from_tensor(held.local)
    data = TensorWriteData(chunk=_chunk(box), properties=properties, size=held.shape)
    return WriteItem(index=MetadataIndex(key, torch.Size(box.offsets)), type=WriteItemType.SHARD, tensor_data=data)


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))


def _box_at(candidates: list[Box], index: MetadataIndex) -> Box:
    return next(box for box in candidates if box.offsets == tuple(index.offset or ()))


# ---- files -----------------------------------------------------------------------------------------------------------


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


class _Writer(FileSystemWriter):
    """Writes one file per rank."""

    def __init__(self, folder: Location) -> None:
        super().__init__(folder.path, single_file_per_rank=True, sync_files=folder.is_local)
        self.fs: Any = _Files(folder)
        self.path = folder.path

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        with _without_inner_checksums():
            return super().write_data(*args, **kwargs)

    @property
    def sums(self) -> Sums:
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


class _Reader(FileSystemReader):
    """Reads DCP's own pickled table without the power to call functions that it names."""

    def __init__(self, folder: Location) -> None:
        super().__init__(folder.path)
        self.folder = folder
        self.fs: Any = _Files(folder)
        self.path = folder.path

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (self.folder / ".metadata").open("rb") as file:
            metadata = _TableUnpickler(file).load()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


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
