"""Says which boxes of a whole tensor a rank's local tensor holds, and gathers whole tensors on rank 0 by them.

FSDP2 cuts what tensor parallelism has left on a rank::

    whole (rows 0..8), tp=2       0 1 2 3 4 | 5 6 7 8
    FSDP2 cuts each part, dp=4    0 1 - 2 3 - 4 -   |  5 - 6 - 7 - 8

DTensor describes such a parameter as a strided shard, which is right as long as the cuts of all tensor-parallel parts
are equally long. Here they are not (dp rank 3 holds nothing of the first part and row 8 of the second), and torch then
gives wrong offsets, in ``full_tensor`` and in the distributed checkpoint alike. So the boxes are computed here, in the
order in which the cuts were made.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from lightning_automodel.fragments import Fragment

Span = tuple[int, int]
"""Start and stop along one dim of the whole tensor."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A box of the whole tensor that is a box of the local tensor too."""

    offsets: tuple[int, ...]
    """where it begins in the whole tensor"""
    local_offsets: tuple[int, ...]
    """where it begins in the local tensor"""
    sizes: tuple[int, ...]

    def of_whole(self, whole: Tensor) -> Tensor:
        """The box as a view of the whole tensor."""
        return whole[_slices(self.offsets, self.sizes)]

    def of_local(self, local: Tensor) -> Tensor:
        """The box as a view of the local tensor."""
        return local[_slices(self.local_offsets, self.sizes)]


def pieces(tensor: Tensor) -> list[Piece]:
    """What this rank holds of ``tensor``; a plain tensor is one piece. Empty boxes are left out."""
    if isinstance(tensor, Fragment):
        return list(tensor.partition.mine)
    if not isinstance(tensor, DTensor):
        zeros = (0,) * tensor.ndim
        return [Piece(offsets=zeros, local_offsets=zeros, sizes=tuple(tensor.shape))]
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    found = pieces_at(tensor.shape, tensor.device_mesh.shape, tensor.placements, coordinate)
    size = sum(math.prod(piece.sizes) for piece in found)
    assert size == local_tensor(tensor).numel(), f"{tensor.shape} as {tensor.placements}: {local_tensor(tensor).shape}"
    return found


def pieces_at(
    shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Placement], coordinate: Sequence[int]
) -> list[Piece]:
    """What the rank at ``coordinate`` of a mesh holds of a tensor of ``shape``.

    Raises:
        ValueError: for partial sums, which no rank holds the value of.
    """
    if any(placement.is_partial() for placement in placements):
        raise ValueError(f"a tensor of partial sums ({tuple(placements)}) has no pieces; redistribute it first")
    spans: list[list[Span]] = [[(0, size)] for size in shape]
    for axis in _order_of_cuts(mesh_shape, placements):
        dim = _dim(placements[axis]) % len(shape)
        groups = _stacked(placements, mesh_shape, axis)
        parts = (_chunk(spans[dim], groups, group) for group in range(groups))
        spans[dim] = [span for part in parts for span in _chunk(part, mesh_shape[axis], coordinate[axis])]
    return [_piece(box) for box in itertools.product(*(_with_local_start(s) for s in spans))]


def local_tensor(tensor: Tensor) -> Tensor:
    """The memory that this rank holds of ``tensor``, outside of autograd."""
    if isinstance(tensor, Fragment):
        return tensor.local
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def replicas(tensor: Tensor) -> tuple[int, int]:
    """How many ranks hold the same as this one, and the place of this rank among them. Plain tensors are everywhere."""
    if isinstance(tensor, Fragment):
        return tensor.partition.copies, tensor.partition.index
    if not isinstance(tensor, DTensor):
        return (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    copies, index = 1, 0
    for size, place, placement in zip(tensor.device_mesh.shape, coordinate, tensor.placements, strict=True):
        if placement.is_replicate():
            copies, index = copies * size, index * size + place
    return copies, index


def copy_from_whole(target: Tensor, whole: Tensor) -> None:
    """Overwrites what this rank holds of ``target`` with its part of ``whole``, which may be a memory-mapped file.

    Raises:
        ValueError: if the shapes differ.
    """
    if target.shape != whole.shape:
        raise ValueError(f"a tensor of shape {tuple(whole.shape)} does not fit into one of {tuple(target.shape)}")
    local = local_tensor(target)
    for piece in pieces(target):
        piece.of_local(local).copy_(piece.of_whole(whole))


def gather_whole(tensor: Tensor) -> Tensor | None:
    """The whole tensor on the CPU of rank 0, ``None`` on the others. Collective over the ranks that hold it."""
    if isinstance(tensor, Fragment):
        return _collect(tensor, tensor.partition.holders, tensor.device.type)
    if not isinstance(tensor, DTensor):
        return tensor.detach().cpu() if dist.get_rank() == 0 else None
    pieces(tensor)  # checks that the local tensor is what the mesh says: else ranks would wait for one another
    mesh = tensor.device_mesh
    holders = [
        (int(mesh.mesh[coordinate]), pieces_at(tensor.shape, mesh.shape, tensor.placements, coordinate))
        for coordinate in _holders(mesh.shape, tensor.placements)
    ]
    return _collect(tensor, holders, mesh.device_type)


def _collect(tensor: Tensor, holders: Iterable[tuple[int, Sequence[Piece]]], device_type: str) -> Tensor | None:
    local = local_tensor(tensor)
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") if dist.get_rank() == 0 else None
    for rank, found in holders:
        part = _send_to_zero(local, rank, _local_shape(found, tensor.ndim), device_type) if found else None
        if whole is not None and part is not None:
            for piece in found:
                piece.of_whole(whole).copy_(piece.of_local(part))
    return whole


def _send_to_zero(local: Tensor, source: int, shape: Sequence[int], device_type: str) -> Tensor | None:
    """What rank ``source`` passes as ``local``, on rank 0."""
    if dist.get_rank() not in (0, source):
        return None
    if source == 0:
        return local
    if dist.get_rank() == source:
        dist.send(local.to(device_type).contiguous(), dst=0)
        return None
    received = torch.empty(tuple(shape), dtype=local.dtype, device=device_type)
    dist.recv(received, src=source)
    return received


def _holders(mesh_shape: Sequence[int], placements: Sequence[Placement]) -> Iterable[tuple[int, ...]]:
    """Coordinates that hold the whole tensor between them, each part once."""
    sizes = (1 if p.is_replicate() else size for size, p in zip(mesh_shape, placements, strict=True))
    return itertools.product(*map(range, sizes))


def _local_shape(found: Sequence[Piece], ndim: int) -> list[int]:
    return [max(piece.local_offsets[dim] + piece.sizes[dim] for piece in found) for dim in range(ndim)]


# ---- cuts ------------------------------------------------------------------------------------------------------------


def _order_of_cuts(mesh_shape: Sequence[int], placements: Sequence[Placement]) -> list[int]:
    """Mesh axes in the order in which they cut: left to right, but FSDP2 (left) cuts what the axes right of it left."""
    cutting = [axis for axis, placement in enumerate(placements) if not placement.is_replicate()]
    return sorted(cutting, key=lambda axis: _cuts_later(placements, mesh_shape, axis))


def _cuts_later(placements: Sequence[Placement], mesh_shape: Sequence[int], axis: int) -> bool:
    """Whether the stride of a strided shard only says that the axes right of it have cut before."""
    if placements[axis].is_shard():
        return False
    right = [i for i in range(axis + 1, len(placements)) if not placements[i].is_replicate()]
    return math.prod(mesh_shape[i] for i in right if _dim(placements[i]) == _dim(placements[axis])) == _stride(
        placements[axis]
    )


def _stacked(placements: Sequence[Placement], mesh_shape: Sequence[int], axis: int) -> int:
    """Number of matrices that are stacked in one tensor, each of which is cut."""
    is_one = placements[axis].is_shard() or _cuts_later(placements, mesh_shape, axis)
    return 1 if is_one else _stride(placements[axis])


def _dim(placement: Placement) -> int:
    return placement.dim  # type: ignore[attr-defined]


def _stride(placement: Placement) -> int:
    return placement.split_factor  # type: ignore[attr-defined]


def _chunk(spans: list[Span], count: int, index: int) -> list[Span]:
    """The ``index``-th of ``count`` parts of ``spans`` taken end to end, as ``torch.chunk`` cuts."""
    total = sum(stop - start for start, stop in spans)
    size = -(-total // count)
    begin, end = min(index * size, total), min((index + 1) * size, total)
    result, position = [], 0
    for start, stop in spans:
        first, last = max(begin, position), min(end, position + stop - start)
        if first < last:
            result.append((start + first - position, start + last - position))
        position += stop - start
    return result


def _with_local_start(spans: list[Span]) -> list[tuple[int, Span]]:
    starts = itertools.accumulate((stop - start for start, stop in spans), initial=0)
    return list(zip(starts, spans, strict=False))


def _piece(box: tuple[tuple[int, Span], ...]) -> Piece:
    return Piece(
        offsets=tuple(start for _, (start, _) in box),
        local_offsets=tuple(local for local, _ in box),
        sizes=tuple(stop - start for _, (start, stop) in box),
    )


def _slices(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
