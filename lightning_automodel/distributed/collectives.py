"""The collectives of tensor parallelism as autograd functions on local tensors.

Each comes in a pair: what one does in the forward pass, its adjoint does in the backward pass (Megatron-LM's f and g,
Shoeybi et al. 2019, section 3). "Whole" means equal on all ranks of the group; "part" means a term of a sum or a slice.

    =============  ==========================  ===========================
    function       forward                     backward
    =============  ==========================  ===========================
    copy_in        nothing                     all-reduce (whole -> parts)
    reduce_out     all-reduce                  nothing (parts -> whole)
    gather         all-gather on ``dim``       slice
    split          slice on ``dim``            all-gather
    gather_in      all-gather on ``dim``       reduce-scatter
    scatter_out    reduce-scatter on ``dim``   all-gather
    exchange_rows  all-to-all of rows          all-to-all back
    =============  ==========================  ===========================

Where a backward pass is itself differentiated (``create_graph=True``), it takes the same functions: the backward pass
of each is the forward pass of another one.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import Shard

from lightning_automodel._compat.torch.groups import all_gather, reduce_scatter
from lightning_automodel._compat.torch.tensors import written_output
from lightning_automodel.distributed.second_order import is_differentiated


def shard_bounds(size: int, parts: int, index: int) -> tuple[int, int]:
    """Returns start and length of chunk ``index`` as DTensor cuts ``size``: ``ceil(size / parts)`` each, the rest
    shorter or empty.
    """
    length, offset = Shard.local_shard_size_and_offset(size, parts, index)
    return offset, length


def copy_in(x: Tensor, group: ProcessGroup) -> Tensor:
    """Mark where a whole ``x`` enters work that is sharded over ``group``: its gradients are summed."""
    return _CopyIn.apply(x, group) if x.requires_grad else x


def reduce_out(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sums the partial results ``x`` over ``group``; every rank has the same gradient already."""
    return _ReduceOut.apply(x, group)


def gather(x: Tensor, dim: int, size: int, group: ProcessGroup) -> Tensor:
    """Joins the slices ``x`` of dimension ``dim``, which is ``size`` long as a whole."""
    return _Gather.apply(x, dim, size, group)


def split(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Cuts this rank's chunk of dimension ``dim`` out of a whole ``x``."""
    return _Split.apply(x, dim, group)


def gather_in(x: Tensor, dim: int, size: int, group: ProcessGroup) -> Tensor:
    """Joins the slices ``x`` where they enter work that is split over ``group``: gradients are summed and cut again."""
    return _GatherIn.apply(x, dim, size, group)


def scatter_out(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Sums the partial results ``x`` over ``group`` and keeps this rank's slice of dimension ``dim``."""
    return _ScatterOut.apply(x, dim, group)


def exchange_rows(x: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    """Sends ``sent[i]`` rows of ``x`` [rows, ...] to rank i, in order, and returns the rows that come, by rank."""
    return _ExchangeRows.apply(x, sent, received, group)


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """Returns ``x``, whose gradient is multiplied by ``factor``."""
    return _ScaleGradient.apply(x, factor) if x.requires_grad else x


def summed(grad: Tensor, group: ProcessGroup) -> Tensor:
    """Sum the gradients ``grad`` over ``group`` in a backward pass, which may itself be differentiated."""
    return (reduce_out if is_differentiated() else _all_reduce)(grad, group)


def _all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=group)
    return out


def _slice(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    start, length = shard_bounds(x.shape[dim], group.size(), group.rank())
    return x.narrow(dim, start, length).contiguous()


def _all_gather(x: Tensor, dim: int, size: int, group: ProcessGroup) -> Tensor:
    lengths = [shard_bounds(size, group.size(), i)[1] for i in range(group.size())]
    padded = list(x.shape)
    padded[dim] = lengths[0]
    if x.shape[dim] != lengths[0]:  # only the last slices can be shorter; collectives need equal shapes
        buffer = x.new_zeros(padded)
        buffer.narrow(dim, 0, x.shape[dim]).copy_(x)
        x = buffer
    gathered = x.new_empty([len(lengths) * padded[0], *padded[1:]])
    all_gather(gathered, x.contiguous(), group=group)
    if dim % x.ndim == 0:  # the slices lie one after another, and only the end can be filled up
        return gathered.narrow(0, 0, size)
    parts = gathered.chunk(len(lengths))
    return torch.cat([part.narrow(dim, 0, n) for part, n in zip(parts, lengths, strict=True)], dim)


def _reduce_scatter(x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    size, ranks = x.shape[dim], group.size()
    length = shard_bounds(size, ranks, 0)[1]
    if length * ranks != size:  # collectives need equal shapes: zeros fill what the last slices lack
        shape = list(x.shape)
        shape[dim] = length * ranks - size
        x = torch.cat([x, x.new_zeros(shape)], dim)
    parts = torch.stack(x.chunk(ranks, dim)) if dim else x.contiguous()
    out = x.new_empty([*x.shape[:dim], length, *x.shape[dim + 1 :]])
    reduce_scatter(out, parts.flatten(0, 1) if dim else parts, group=group)
    own = shard_bounds(size, ranks, group.rank())[1]
    return out if own == length else out.narrow(dim, 0, own).clone()  # blocks may add to it in place, not to a view


class _CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return summed(grad, ctx.group), None


class _ReduceOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return written_output(_all_reduce(x, group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return copy_in(grad, ctx.group) if is_differentiated() else grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, size: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _all_gather(x, dim, size, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return (split if is_differentiated() else _slice)(grad, ctx.dim, ctx.group), None, None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.size, ctx.group = dim, x.shape[dim], group
        return _slice(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        join = gather if is_differentiated() else _all_gather
        return join(grad, ctx.dim, ctx.size, ctx.group), None, None


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all_rows(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        move = exchange_rows if is_differentiated() else _all_to_all_rows
        return move(grad, ctx.received, ctx.sent, ctx.group), None, None, None


def _all_to_all_rows(x: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


class _GatherIn(_Gather):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return (scatter_out if is_differentiated() else _reduce_scatter)(grad, ctx.dim, ctx.group), None, None, None


class _ScatterOut(_Split):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.dim, ctx.size, ctx.group = dim, x.shape[dim], group
        return _reduce_scatter(x, dim, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        join = gather_in if is_differentiated() else _all_gather
        return join(grad, ctx.dim, ctx.size, ctx.group), None, None
