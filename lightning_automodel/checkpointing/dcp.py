"""Tells torch's distributed checkpoint (DCP) what each rank holds of a tensor, and reads without running pickled code.

DCP's own planners describe a rank's part of a DTensor as one box, at offsets that can be wrong (see ``shards``).
"""

import io
import pickle
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
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

from lightning_automodel.shards import Piece, copy_from_whole, local_tensor, pieces

Tree = dict[str, Any]


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor in a checkpoint folder that has not been read."""

    folder: Path
    key: str
    shape: torch.Size
    dtype: torch.dtype

    def load(self) -> Tensor:
        """The whole tensor, on the CPU; each rank that calls reads it for itself."""
        tensor = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        _load_alone({self.key: tensor}, self.folder, _PieceReader())
        return tensor


def write_tensors(tree: Mapping[str, Any], folder: Path) -> None:
    """Writes a tree of tensors. Collective; what several ranks hold is written by one of them."""
    writer = FileSystemWriter(folder, single_file_per_rank=True, overwrite=True)
    dcp.save(dict(tree), storage_writer=writer, planner=_PieceWriter())


def list_tensors(folder: Path, weights_only: bool | None) -> Tree:
    """The tree that was written, with a :class:`StoredTensor` for each tensor. Other objects are read at once.

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
        for folder in sorted({source.folder for source in turn}):
            wanted = {source.key: target for source, target in turn.items() if source.folder == folder}
            dcp.load(wanted, storage_reader=_Reader(folder), planner=_PieceReader())
        waiting = [(target, source) for target, source in waiting if turn[source] is not target]


def _read_objects(folder: Path, keys: list[str], weights_only: bool | None) -> Tree:
    values: Tree = dict.fromkeys(keys)
    if keys:
        _load_alone(values, folder, _ObjectReader(weights_only))
    return values


def _load_alone(values: Tree, folder: Path, planner: DefaultLoadPlanner) -> None:
    """On this rank only, which DCP would warn of."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(values, storage_reader=_Reader(folder), planner=planner, no_dist=True)


def _with_lists(tree: Any) -> Any:
    """DCP names the elements of a list by their numbers."""
    if not isinstance(tree, dict):
        return tree
    values = {key: _with_lists(value) for key, value in tree.items()}
    is_list = bool(values) and all(isinstance(key, int) for key in values)
    return [values[i] for i in range(len(values))] if is_list else values


# ---- plans -----------------------------------------------------------------------------------------------------------


class _PieceWriter(DefaultSavePlanner):
    """Writes each piece that this rank holds."""

    def create_local_plan(self) -> SavePlan:
        items = [_write_item(key, t, piece) for key, t in self.state_dict.items() for piece in pieces(t)]
        self.plan = SavePlan(items, planner_data=self.mappings)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return _piece_at(self.state_dict[index.fqn], index)


class _PieceReader(DefaultLoadPlanner):
    """Reads each piece that this rank holds."""

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
            items += create_read_items_for_chunk_list(key, stored, [_chunk(piece) for piece in pieces(tensor)])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return _piece_at(self.state_dict[index.fqn], index)


class _ObjectReader(DefaultLoadPlanner):
    def __init__(self, weights_only: bool | None) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.weights_only = weights_only

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=self.weights_only)


def _write_item(key: str, tensor: Tensor, piece: Piece) -> WriteItem:
    properties = TensorProperties.create_from_tensor(local_tensor(tensor))
    data = TensorWriteData(chunk=_chunk(piece), properties=properties, size=tensor.size())
    return WriteItem(index=MetadataIndex(key, torch.Size(piece.offsets)), type=WriteItemType.SHARD, tensor_data=data)


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(piece.offsets), sizes=torch.Size(piece.sizes))


def _piece_at(tensor: Tensor, index: MetadataIndex) -> Tensor:
    piece = next(piece for piece in pieces(tensor) if piece.offsets == tuple(index.offset or ()))
    return piece.of_local(local_tensor(tensor))


# ---- files -----------------------------------------------------------------------------------------------------------


class _Reader(FileSystemReader):
    """Reads DCP's own pickled table without the power to call functions that it names."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
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
