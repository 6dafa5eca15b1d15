"""Exchanges rows of all heads for all rows of some heads, for attention over a sequence that is cut.

::

    4 heads, 2 ranks        rank 0              rank 1
    rows                    heads 0-3, rows A   heads 0-3, rows B
    heads                   heads 0-1, A and B  heads 2-3, A and B
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_automodel._compat.torch.groups import all_to_all_in_graph
from lightning_automodel.distributed.sequence_rows import Rows

_Move = Callable[[Tensor, Rows], Tensor]


def rows_to_heads(x: Tensor, rows: Rows) -> Tensor:
    """Exchange [batch, heads, rows, dim] for [batch, heads / ranks, seq, dim]; the gradient goes the other way."""
    return _exchanged(x, rows, _to_heads, _to_rows)


def heads_to_rows(x: Tensor, rows: Rows) -> Tensor:
    """Exchange [batch, heads / ranks, seq, dim] for [batch, heads, rows, dim]; the gradient goes the other way."""
    return _exchanged(x, rows, _to_rows, _to_heads)


def _exchanged(x: Tensor, rows: Rows, there: _Move, back: _Move) -> Tensor:
    """Move ``x`` there, and its gradient back.

    In a graph autograd follows the parts by itself: in one for all lengths a function of ours cannot keep edges of
    ``rows`` that only its backward pass reads.
    """
    return there(x, rows) if torch.compiler.is_compiling() else _Exchange.apply(x, rows, there, back)


def _to_heads(x: Tensor, rows: Rows) -> Tensor:
    ranks = rows.group.size()
    batch, heads, _, dim = x.shape
    shapes: list[tuple[int, ...]] = [(batch, heads // ranks, count, dim) for count in rows.counts]
    return rows.restore(_all_to_all(list(x.chunk(ranks, 1)), shapes, rows.group), 2)


def _to_rows(x: Tensor, rows: Rows) -> Tensor:
    batch, heads, _, dim = x.shape
    ranks = rows.group.size()
    parts = [rows.cut_for(x, 2, rank) for rank in range(ranks)]
    return torch.cat(_all_to_all(parts, [(batch, heads, rows.count, dim)] * ranks, rows.group), 1)


def _all_to_all(parts: list[Tensor], shapes: list[tuple[int, ...]], group: ProcessGroup) -> list[Tensor]:
    """Send ``parts[i]`` to rank ``i``, and return what each rank has sent, of the given ``shapes``. One collective."""
    flat = torch.cat([part.reshape(-1) for part in parts])
    sizes = [math.prod(shape) for shape in shapes]
    sent = [part.numel() for part in parts]
    if torch.compiler.is_compiling():
        out = all_to_all_in_graph(flat, sizes, sent, group)
    else:
        out = flat.new_empty(sum(sizes))
        dist.all_to_all_single(out, flat, sizes, sent, group=group)
    return [piece.view(shape) for piece, shape in zip(out.split(sizes), shapes, strict=True)]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows, there: _Move, back: _Move) -> Tensor:
        ctx.rows, ctx.back = rows, back
        return there(x, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(grad, ctx.rows), None, None, None
