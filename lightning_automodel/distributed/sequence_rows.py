"""Divides a sequence over the ranks of an axis: which rows each one holds, and the collectives between them.

::

    24 tokens, 4 ranks      rank 0        rank 1        rank 2        rank 3
    balanced                0-2, 21-23    3-5, 18-20    6-8, 15-17    9-11, 12-14
    not balanced            0-5           6-11          12-17         18-23

Later rows of a causal model see more keys; balanced, every rank has as many pairs to compute. A rank differentiates its
own part of the loss, so every gradient is a part, and the sum over the ranks is the whole gradient:

    =============  =============================  ======================================
    function       forward                        backward
    =============  =============================  ======================================
    Rows.cut       own rows of a whole tensor     own rows among zeros: a part
    gather_parts   all-gather of the rows         reduce-scatter (parts of all ranks)
    gather_whole   all-gather of the rows         own rows, times ``scale``: every rank has the whole gradient
    sum_parts      all-reduce                     the same, times ``scale``
    average_grad   the same tensor                all-reduce: of parts times the number of ranks, the whole gradient
    =============  =============================  ======================================
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_automodel._compat.torch.groups import reduce_scatter
from lightning_automodel._compat.torch.tensors import written_output
from lightning_automodel.distributed.collectives import shard_bounds

Bounds = tuple[int, int]


def chunk_bounds(length: int, ranks: int, balanced: bool) -> tuple[tuple[Bounds, ...], ...]:
    """Find start and stop of each rank's chunks, one or two, in order.

    A rank holds as many rows as DTensor would give it. Balanced, of ``2 * ranks`` chunks it has one from the front and
    the opposite one.
    """
    totals = [shard_bounds(length, ranks, rank)[1] for rank in range(ranks)]
    if not balanced:
        starts = [sum(totals[:rank]) for rank in range(ranks)]
        return tuple(((a, a + n),) for a, n in zip(starts, totals, strict=True))
    sizes = [(n + 1) // 2 for n in totals] + [n // 2 for n in reversed(totals)]
    edges = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    bounds = list(pairwise(edges))
    return tuple((bounds[rank], bounds[2 * ranks - 1 - rank]) for rank in range(ranks))


@dataclass(frozen=True)
class Rows:
    """Which rank holds which rows of one sequence.

    Attributes:
        length: tokens of the whole sequence.
        group: ranks of the axis.
        chunks: by rank, start and stop of its chunks.
    """

    length: int
    group: ProcessGroup
    chunks: tuple[tuple[Bounds, ...], ...]

    @classmethod
    def divide(cls, length: int, group: ProcessGroup, balanced: bool) -> "Rows":
        """Cut ``length`` tokens over ``group``."""
        return cls(length, group, chunk_bounds(length, group.size(), balanced))

    @property
    def own_chunks(self) -> tuple[Bounds, ...]:
        """Return start and stop of this rank's chunks."""
        return self.chunks[self.group.rank()]

    @property
    def counts(self) -> list[int]:
        """Count the rows of each rank."""
        return [sum(stop - start for start, stop in chunks) for chunks in self.chunks]

    @property
    def count(self) -> int:
        """Count the rows of this rank."""
        return self.counts[self.group.rank()]

    def cut(self, whole: Tensor, dim: int) -> Tensor:
        """Take this rank's rows of dimension ``dim``: a copy, which does not keep the whole tensor alive."""
        return self.cut_for(whole, dim, self.group.rank())

    def order(self) -> Tensor:
        """List the original positions of the rows of all ranks, one rank after the other: int64 [length]."""
        return torch.cat([torch.arange(*bounds) for chunks in self.chunks for bounds in chunks])

    def arrange(self, whole: Tensor, dim: int) -> Tensor:
        """Sort dimension ``dim`` by rank: equally long parts, filled with zeros."""
        longest = max(self.counts)
        parts = [_padded(self.cut_for(whole, dim, rank), dim, longest) for rank in range(self.group.size())]
        return torch.cat(parts, dim)

    def restore(self, parts: list[Tensor], dim: int) -> Tensor:
        """Join what the ranks hold, filled up or not, in the order of the sequence."""
        pieces = [_split(part, dim, chunks) for part, chunks in zip(parts, self.chunks, strict=True)]
        # The order of chunk_bounds, not sorted: in a graph for all lengths, edges are no numbers that can be compared.
        front, back = [own[0] for own in pieces], [own[1] for own in reversed(pieces) if len(own) > 1]
        return torch.cat(front + back, dim)

    def cut_for(self, whole: Tensor, dim: int, rank: int) -> Tensor:
        """Take the rows of ``rank``, in the same way."""
        pieces = [whole.narrow(dim, start, stop - start) for start, stop in self.chunks[rank]]
        return torch.cat(pieces, dim) if len(pieces) > 1 else pieces[0].clone(memory_format=torch.contiguous_format)


def gather_parts(x: Tensor, dim: int, rows: Rows) -> Tensor:
    """Join the rows of all ranks where each rank goes on with a part of the work: gradients are summed."""
    return _GatherParts.apply(x, dim, rows)


def gather_whole(x: Tensor, dim: int, rows: Rows, scale: float = 1.0) -> Tensor:
    """Join the rows of all ranks where each rank repeats what follows; gradients are multiplied by ``scale``."""
    return _GatherWhole.apply(x, dim, rows, scale)


def sum_parts(x: Tensor, group: ProcessGroup, scale: float = 1.0) -> Tensor:
    """Sum the parts ``x`` of a value over ``group``; gradients are multiplied by ``scale``."""
    return _SumParts.apply(x, group, scale)


def average_grad(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return ``x``, whose gradients are averaged over ``group``: whole on every rank, also where they were parts."""
    return _AverageGrad.apply(x, group)


def join_rows(x: Tensor, dim: int, rows: Rows) -> Tensor:
    """All-gather rows on ``dim``, in the order of the sequence, without a gradient."""
    longest = max(rows.counts)
    x = _padded(x, dim, longest).contiguous()
    parts = [torch.empty_like(x) for _ in range(rows.group.size())]
    dist.all_gather(parts, x, group=rows.group)
    return rows.restore(parts, dim)


def sum_rows(x: Tensor, dim: int, rows: Rows) -> Tensor:
    """Reduce-scatter a whole tensor on ``dim``: the sum over the ranks, of which each gets its own rows."""
    parts = rows.arrange(x.movedim(dim, 0), 0).contiguous()
    out = parts.new_empty([max(rows.counts), *parts.shape[1:]])
    reduce_scatter(out, parts, group=rows.group)
    return out[: rows.count].movedim(0, dim).contiguous()


def _split(part: Tensor, dim: int, chunks: tuple[Bounds, ...]) -> list[Tensor]:
    """Split what a rank holds, filled up or not, into its chunks."""
    pieces, at = [], 0
    for start, stop in chunks:
        pieces.append(part.narrow(dim, at, stop - start))
        at += stop - start
    return pieces


def _padded(x: Tensor, dim: int, length: int) -> Tensor:
    """Fill dimension ``dim`` up with zeros: collectives need equal shapes."""
    if x.shape[dim] == length:
        return x
    shape = list(x.shape)
    shape[dim] = length - x.shape[dim]
    return torch.cat([x, x.new_zeros(shape)], dim)


class _GatherParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, rows: Rows) -> Tensor:
        ctx.dim, ctx.rows = dim, rows
        return join_rows(x, dim, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return sum_rows(grad, ctx.dim, ctx.rows), None, None


class _GatherWhole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, rows: Rows, scale: float) -> Tensor:
        ctx.dim, ctx.rows, ctx.scale = dim, rows, scale
        return join_rows(x, dim, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.rows.cut(grad, ctx.dim) * ctx.scale, None, None, None


class _SumParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, scale: float) -> Tensor:
        ctx.scale = scale
        total = x.clone()
        dist.all_reduce(total, group=group)
        return written_output(total)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad * ctx.scale, None, None


class _AverageGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        average = grad.contiguous() / ctx.group.size()
        dist.all_reduce(average, group=ctx.group)
        return average, None
