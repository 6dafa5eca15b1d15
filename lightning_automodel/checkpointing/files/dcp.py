"""Tells torch's distributed checkpoint (DCP) what each rank holds of a tensor, and reads without running pickled code.

DCP's own planners describe a rank's part of a DTensor as one box, at offsets that can be wrong (see ``shards``).
"""

import io
import warnings
import zlib
from collections.abc import Generator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from lightning_automodel.checkpointing.files.dcp_files import Reader, Writer
from lightning_automodel.checkpointing.files.integrity import Sums, check_edition, edition_of
from lightning_automodel.checkpointing.files.storage import Location
from lightning_automodel.checkpointing.unread import ReadWhenUsed
from lightning_automodel.distributed.boxes import Box
from lightning_automodel.distributed.shards import boxes_of, copy_from_whole, local_tensor, place_among_replicas

Tree = dict[str, Any]


@dataclass(frozen=True, eq=False)
class StoredTensor(ReadWhenUsed):
    """A tensor in a checkpoint folder that has not been read.

    Attributes:
        edition: of the folder, when its table was read.
    """

    folder: Location
    key: str
    shape: torch.Size
    dtype: torch.dtype
    edition: int | None

    def load(self) -> Tensor:
        """Reads the whole tensor to the CPU, on each rank that calls."""
        tensor = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        with _ordinary_errors():
            _load_alone({self.key: tensor}, Reader(self.folder, self.edition), _BoxReader())
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
        if not tensor.numel():  # nobody has a part of it
            tensor = local_tensor(tensor).new_empty(tensor.shape)
        copies, index = place_among_replicas(tensor)
        is_writer = zlib.crc32(key.encode()) % copies == index
        local = local_tensor(tensor)
        return Held(local if is_writer else local.new_empty(0), tensor.shape, boxes_of(tensor) if is_writer else [])


@dataclass(frozen=True)
class SameAs:
    """Another name of a tensor that is written once: ``key`` of the other, as the folder has it."""

    key: str


def write_tensors(tree: Mapping[str, Any], folder: Location, group: ProcessGroup | None = None) -> Sums:
    """Writes a tree of ``Held`` and ``SameAs``; what else is in it, rank 0 pickles. Collective over ``group`` (default:
    all).

    Returns:
        sizes and checksums of the files that this rank wrote.

    Raises:
        RuntimeError: on every rank, with what went wrong on which.
    """
    planner = _BoxWriter()
    writer = Writer(folder, planner.name_twice)
    with _ordinary_errors():
        dcp.save(dict(tree), storage_writer=writer, planner=planner, process_group=group)
    return writer.sums


@contextmanager
def _ordinary_errors() -> Generator[None, None, None]:
    """Raises DCP's exception, which is no ``Exception``, as one that callers and threads can handle."""
    try:
        yield
    except dcp.CheckpointException as error:
        causes = [f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in error.failures.items()]
        raise RuntimeError("; ".join(causes)) from error


def list_tensors(folder: Location, weights_only: bool | None, known: Set[str] = frozenset()) -> Tree:
    """Reads the tree that was written, with a :class:`StoredTensor` for each tensor.

    Args:
        folder: with torch's table.
        weights_only: refuse objects other than tensors and plain containers.
        known: branches of which only tensors are wanted.

    Raises:
        pickle.UnpicklingError: if an object needs ``weights_only=False``.
    """
    edition = edition_of(folder)
    reader = Reader(folder, edition)
    metadata = reader.read_metadata()
    paths = {key: (metadata.planner_data or {}).get(key, (key,)) for key in metadata.state_dict_metadata}
    table = metadata.state_dict_metadata
    tensors = {key: stored for key, stored in table.items() if isinstance(stored, TensorStorageMetadata)}
    objects = [key for key, path in paths.items() if key not in tensors and path[0] not in known]
    values = _read_objects(reader, objects, weights_only)
    tree: Tree = {}
    for key in (*tensors, *objects):
        *parents, last = paths[key]
        node: dict = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        if (stored := tensors.get(key)) is not None:
            node[last] = StoredTensor(folder, key, stored.size, stored.properties.dtype, edition)
        else:
            node[last] = values[key]
    return _with_lists(tree)


def fetch(pairs: list[tuple[Tensor, StoredTensor | Tensor]]) -> None:
    """Overwrites what this rank holds of each first tensor with its part of the second, converting dtypes. Collective.

    Raises:
        ValueError: if the shapes of a pair differ.
        RuntimeError, ValueError: on every rank, if a folder cannot be read, or is another one than when its table was
            read.
    """
    waiting: list[tuple[Tensor, StoredTensor]] = []
    for target, source in pairs:
        if isinstance(source, Tensor):
            copy_from_whole(target, source)
        else:
            waiting.append((target, source))
    while waiting:  # a pass serves one target of each stored tensor
        turn = {source: target for target, source in waiting}
        editions = {source.folder: source.edition for source in turn}
        for folder in sorted(editions, key=str):
            wanted = {source.key: target for source, target in turn.items() if source.folder == folder}
            with _ordinary_errors():
                _load(wanted, Reader(folder, editions[folder]))
        waiting = [(target, source) for target, source in waiting if turn[source] is not target]


def _load(values: Tree, reader: Reader) -> None:
    try:
        dcp.load(values, storage_reader=reader, planner=_BoxReader())
    except dcp.CheckpointException:
        check_edition(reader.folder, reader.edition)  # in the place of an error that follows from it
        raise


def _read_objects(reader: Reader, keys: list[str], weights_only: bool | None) -> Tree:
    values: Tree = dict.fromkeys(keys)
    if keys:
        _load_alone(values, reader, _ObjectReader(weights_only))
    return values


def _load_alone(values: Tree, reader: Reader, planner: DefaultLoadPlanner) -> None:
    """Loads on this rank only, without DCP's warning about that."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(values, storage_reader=reader, planner=planner, no_dist=True)


def _with_lists(tree: Any) -> Any:
    """Turns dicts with the keys 0, 1, ... back into lists, whose elements DCP names by number."""
    if not isinstance(tree, dict):
        return tree
    values = {key: _with_lists(value) for key, value in tree.items()}
    is_list = bool(values) and all(isinstance(key, int) for key in values)
    return [values[i] for i in range(len(values))] if is_list else values


# ---- plans -----------------------------------------------------------------------------------------------------------


class _BoxWriter(DefaultSavePlanner):
    """Writes each box that this rank holds; of objects, those of the coordinator."""

    def create_local_plan(self) -> SavePlan:
        items: list[WriteItem] = []
        for key, value in self.state_dict.items():
            if isinstance(value, Held):
                items += [_write_item(key, value, box) for box in value.boxes]
            elif self.is_coordinator and not isinstance(value, SameAs):
                items.append(WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO))
        self.plan = SavePlan(items, planner_data=self.mappings)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        return _box_at(value.boxes, index).of_local(value.local) if isinstance(value, Held) else value

    def name_twice(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Lets other names of a tensor lead to what was written, for tools that ask for each name."""
        for key, value in self.state_dict.items():
            if isinstance(value, SameAs):
                metadata.state_dict_metadata[key] = metadata.state_dict_metadata[value.key]
                parts = [part for written in results for part in written if part.index.fqn == value.key]
                results.append([replace(part, index=replace(part.index, fqn=key)) for part in parts])


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
