"""Keeps logits as a rank's rows of the sequence until somebody looks at the whole."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_automodel._compat.dtensor.gradients import to_local
from lightning_automodel._compat.fake.ranks import key_of
from lightning_automodel._compat.torch.pytree import tree_leaves, tree_map_only
from lightning_automodel._compat.torch.tensors import version_of
from lightning_automodel.distributed.collectives import shard_bounds
from lightning_automodel.distributed.sequence_rows import Rows, gather_whole, join_rows
from lightning_automodel.loss.calls import name_of
from lightning_automodel.loss.sharded_logits import join_shards
from lightning_automodel.loss.vocab_parallel import Ungathered
from lightning_automodel.modules.reachable_code import is_of_library

_OF_GRAPH = {"requires_grad", "grad_fn", "is_leaf", "_base"}  # the last: FSDP2 asks whether outputs are views
_OF_SHAPE = {
    *("shape", "dtype", "device", "ndim", "layout", "is_cpu", "is_cuda", "is_sparse", "is_nested", "is_meta"),
    *("size", "dim", "numel", "is_floating_point", "is_complex", "element_size"),
}
_ROWWISE = {"to", "float", "type", "detach", "contiguous", "clone"}
"""Functions of torch, by name, after which rows are rows still."""
_OF_ROWS = {*_OF_GRAPH, *_ROWWISE, "register_hook", "retain_grad"}

_NO_GRADIENT = (
    "logits beside a loss under cp are a rank's rows, whose gradient is not kept; a function that you give to "
    "output.logits.register_hook sees that of all rows, or call the model without labels, and compute the loss of its "
    "logits"
)


class RowLogits(Ungathered):
    """Stands for logits [batch, seq, vocab] of which this rank has computed some rows, after the loss was computed.

    Most steps look at the loss alone, so nothing is gathered before a function of torch is called with these; what it
    gets is whole, in order, equal on all ranks, and differentiable. Collective then: all ranks call the same. Whole
    logits are kept where somebody wrote into them, or may do so through a view.
    """

    own: Tensor
    rows: Rows
    scale: float
    joined: Tensor | None

    @staticmethod
    def of_rows(own: Tensor, rows: Rows, scale: float) -> "RowLogits":
        """Make logits from this rank's rows ``own`` [batch, rows, vocab], plain or cut on the vocabulary."""
        logits: Any = _StandIn.apply(own, rows, scale).as_subclass(RowLogits)
        logits.own, logits.rows, logits.scale, logits.joined = own, rows, scale, None
        return logits

    def whole(self) -> Tensor:
        """Gather the rows of all ranks: [batch, seq, vocab], cut on the vocabulary as before."""
        if self.joined is not None:
            return self.joined
        # Kept, they are read where gradients are recorded, too, though they were first read where none are.
        with torch.inference_mode(self.own.is_inference()), torch.enable_grad():
            if isinstance(self.own, DTensor):
                joined = gather_whole(to_local(self.own), 1, self.rows, self.scale)
                return join_shards(joined, self.own.device_mesh, self.shape[-1])
            return gather_whole(self.own, 1, self.rows, self.scale)

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, name_of(func)
        if func is torch.autograd.grad:
            return _gradients(*args, **kwargs)
        first = args[0] if args else None
        if isinstance(first, RowLogits):
            if name in _OF_SHAPE:
                return super().__torch_function__(func, types, args, kwargs)
            if name in _OF_ROWS and first.joined is None:
                return _of_rows(first, func, name, args[1:], kwargs)
        found = [x for x in tree_leaves((args, kwargs)) if isinstance(x, RowLogits)]
        wholes = {id(logits): logits.whole() for logits in found}
        versions = {key: _version(whole) for key, whole in wholes.items()}
        args, kwargs = tree_map_only(RowLogits, lambda logits: wholes[id(logits)], (args, kwargs))
        result = func(*args, **kwargs)
        for logits in found:
            whole = wholes[id(logits)]
            version = _version(whole)
            may_be_written = version is None or version != versions[id(logits)] or name.endswith("__set__")
            if may_be_written or any(_shares_memory(x, whole) for x in tree_leaves(result)):
                logits.joined = whole
        return result


def _version(whole: Tensor) -> int | None:
    """Count the writes into ``whole``; ``None``: torch does not count them."""
    return None if whole.is_inference() else version_of(whole)


def _shares_memory(value: Any, whole: Tensor) -> bool:
    if not isinstance(value, Tensor) or isinstance(value, DTensor) or isinstance(whole, DTensor):
        return False
    return key_of(value.untyped_storage()) == key_of(whole.untyped_storage())


def _of_rows(logits: RowLogits, func: Callable, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Answer with this rank's rows alone."""
    if name == "register_hook":
        return logits.own.register_hook(_hook_of_rows(logits, *args, **kwargs))
    if name == "retain_grad":
        raise ValueError(_NO_GRADIENT)
    result = func(logits.own, *args, **kwargs)
    if name in _OF_GRAPH:
        return result
    return logits if result is logits.own else RowLogits.of_rows(result, logits.rows, logits.scale)


# ---- gradients of all rows -------------------------------------------------------------------------------------------


def _hook_of_rows(logits: RowLogits, hook: Callable[[Tensor], Tensor | None]) -> Callable[[Tensor], Tensor | None]:
    """Give ``hook`` the gradient of all rows, unless it is FSDP2's, which looks at none: the backward pass begins."""
    if is_of_library(hook.func if isinstance(hook, partial) else hook):
        return hook
    own, rows, scale = logits.own, logits.rows, logits.scale

    def give_whole(gradient: Tensor) -> Tensor | None:
        changed = hook(_joined_gradient(gradient, rows, scale))
        return None if changed is None else _rows_of_gradient(changed, own, rows, scale)

    return give_whole


def _gradients(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
    """Call ``torch.autograd.grad``, and give the gradients of logits for all rows."""
    outputs, args, kwargs = tree_map_only(RowLogits, lambda logits: logits.whole(), (outputs, args, kwargs))
    inputs = list(inputs) if isinstance(inputs, tuple | list) else [inputs]
    if any(isinstance(x, RowLogits) and isinstance(x.own, DTensor) for x in inputs):
        raise ValueError(_NO_GRADIENT)
    of_rows = [x if isinstance(x, RowLogits) and x.joined is None else None for x in inputs]
    plain = [(x.own if x.joined is None else x.joined) if isinstance(x, RowLogits) else x for x in inputs]
    found = torch.autograd.grad(outputs, plain, *args, **kwargs)
    return tuple(
        gradient if logits is None or gradient is None else _joined_gradient(gradient, logits.rows, logits.scale)
        for logits, gradient in zip(of_rows, found, strict=True)
    )


def _joined_gradient(own: Tensor, rows: Rows, scale: float) -> Tensor:
    """Gather the gradients of the rows of all ranks, cut on the vocabulary as they are."""
    if isinstance(own, DTensor):
        return join_shards(join_rows(own.to_local() / scale, 1, rows), own.device_mesh, own.shape[-1])
    return join_rows(own / scale, 1, rows)


def _rows_of_gradient(whole: Tensor, own: Tensor, rows: Rows, scale: float) -> Tensor:
    """Take the gradient of this rank's rows ``own`` out of the ``whole`` one, cut on the vocabulary if they are."""
    if not isinstance(own, DTensor):
        return rows.cut(whole, 1) * scale
    mesh, size = own.device_mesh, own.shape[-1]
    if isinstance(whole, DTensor):
        shard = whole.to_local()
    else:
        shard = whole.narrow(-1, *shard_bounds(size, mesh.size(), mesh.get_local_rank()))
    return join_shards(rows.cut(shard, 1) * scale, mesh, size)


class _StandIn(torch.autograd.Function):
    """Logits of one element, which functions of somebody's own differentiate as the whole ones.

    It is not a number, for code that reads elements past torch's functions.
    """

    @staticmethod
    def forward(ctx: Any, own: Tensor, rows: Rows, scale: float) -> Tensor:
        ctx.own, ctx.rows, ctx.scale = own.detach(), rows, scale
        element = torch.full((1,), math.nan, dtype=own.dtype, device=own.device)
        return element.expand(own.shape[0], rows.length, own.shape[2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _rows_of_gradient(grad, ctx.own, ctx.rows, ctx.scale), None, None
