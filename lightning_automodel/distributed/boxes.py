"""Computes which boxes of a whole tensor the rank at a place of the mesh holds: geometry, without tensors of a run.

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
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor.placement_types import Placement

Span = tuple[int, int]
"""Start and stop along one dim of the whole tensor."""


@dataclass(frozen=True, kw_only=True)
class Box:
    """A box of the whole tensor that is a box of the local tensor too."""

    offsets: tuple[int, ...]
    """where it begins in the whole tensor"""
    local_offsets: tuple[int, ...]
    """where it begins in the local tensor"""
    sizes: tuple[int, ...]

    def of_whole(self, whole: Tensor) -> Tensor:
        """Returns the box as a view of the whole tensor."""
        return whole[_slices(self.offsets, self.sizes)]

    def of_local(self, local: Tensor) -> Tensor:
        """Returns the box as a view of the local tensor."""
        return local[_slices(self.local_offsets, self.sizes)]


def boxes_at(
    shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Placement], coordinate: Sequence[int]
) -> list[Box]:
    """Computes the boxes that the rank at ``coordinate`` of a mesh holds of a tensor of ``shape``.

    Raises:
        ValueError: for partial sums, which no rank holds the value of.
    """
    if any(placement.is_partial() for placement in placements):
        raise ValueError(f"a tensor of partial sums ({tuple(placements)}) has no boxes; redistribute it first")
    spans: list[list[Span]] = [[(0, size)] for size in shape]
    for axis in _order_of_cuts(mesh_shape, placements):
        dim = _dim(placements[axis]) % len(shape)
        groups = _stacked(placements, mesh_shape, axis)
        parts = (_chunk(spans[dim], groups, group) for group in range(groups))
        spans[dim] = [span for part in parts for span in _chunk(part, mesh_shape[axis], coordinate[axis])]
    return [_box(spans) for spans in itertools.product(*(_with_local_start(s) for s in spans))]


def _order_of_cuts(mesh_shape: Sequence[int], placements: Sequence[Placement]) -> list[int]:
    """Orders mesh axes as they cut: left to right, but FSDP2 (left) cuts what the axes right of it left."""
    cutting = [axis for axis, placement in enumerate(placements) if not placement.is_replicate()]
    return sorted(cutting, key=lambda axis: _cuts_later(placements, mesh_shape, axis))


def _cuts_later(placements: Sequence[Placement], mesh_shape: Sequence[int], axis: int) -> bool:
    """Tells whether the stride of a strided shard only says that the axes right of it have cut before."""
    if placements[axis].is_shard():
        return False
    right = [i for i in range(axis + 1, len(placements)) if not placements[i].is_replicate()]
    return math.prod(mesh_shape[i] for i in right if _dim(placements[i]) == _dim(placements[axis])) == _stride(
        placements[axis]
    )


def _stacked(placements: Sequence[Placement], mesh_shape: Sequence[int], axis: int) -> int:
    """Returns how many matrices are stacked in one tensor, each of which is cut."""
    is_one = placements[axis].is_shard() or _cuts_later(placements, mesh_shape, axis)
    return 1 if is_one else _stride(placements[axis])


def _dim(placement: Placement) -> int:
    return placement.dim  # type: ignore[attr-defined]


def _stride(placement: Placement) -> int:
    return placement.split_factor  # type: ignore[attr-defined]


def _chunk(spans: list[Span], count: int, index: int) -> list[Span]:
    """Cuts the ``index``-th of ``count`` chunks out of ``spans`` taken end to end, as ``torch.chunk`` does."""
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


def _box(spans: tuple[tuple[int, Span], ...]) -> Box:
    return Box(
        offsets=tuple(start for _, (start, _) in spans),
        local_offsets=tuple(local for local, _ in spans),
        sizes=tuple(stop - start for _, (start, stop) in spans),
    )


def _slices(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
