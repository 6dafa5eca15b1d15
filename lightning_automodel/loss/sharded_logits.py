"""Logits that are cut on the vocabulary, as a tensor that gives the numbers of whole ones in every function of torch.

What a function gets, and where it is decided::

    loss, log_softmax, argmax, topk ...   the shards, and a few numbers per token from other ranks  sharded_functions.py
    scaling, casts, views, indexing       the shards alone; the result is cut, too                  sharded_functions.py
    changes in place, addresses           an error
    all others                            whole logits, gathered; the result is plain and equal on all ranks
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lightning_automodel._compat.dtensor.gradients import to_local
from lightning_automodel._compat.dtensor.tensors import whole_shape
from lightning_automodel._compat.torch.pytree import tree_leaves, tree_map_only
from lightning_automodel.distributed.collectives import gather, shard_bounds
from lightning_automodel.distributed.logs import log_once
from lightning_automodel.loss.calls import DESCRIPTIONS, name_of
from lightning_automodel.loss.logit_shard import LogitShard
from lightning_automodel.loss.sharded_functions import FUNCTIONS

_WAYS_OUT = (
    "use lightning_automodel.loss.gather_logits(logits) for whole ones, or the functions beside it, which take shards"
)
_ADDRESSES = {
    *(
        "data_ptr",
        "storage",
        "untyped_storage",
        "_typed_storage",
        "storage_offset",
        "storage_type",
        "set_",
        "share_memory_",
    ),
    *("is_shared", "is_pinned", "pin_memory", "__cuda_array_interface__", "__dlpack__", "__dlpack_device__", "_cdata"),
    *("is_set_to", "_is_zerotensor", "record_stream", "resize", "resize_as", "module_load", "map_", "map2_", "apply_"),
    *("const_data_ptr", "slice_inverse"),
}
"""What looks at the memory of the elements."""
_IN_PLACE = {
    f"__{name}__" for name in ("setitem", "iadd", "isub", "imul", "imatmul", "itruediv", "ifloordiv", "imod")
} | {f"__{name}__" for name in ("idiv", "ipow", "iand", "ior", "ixor", "ilshift", "irshift")}


class ShardedLogitsError(RuntimeError):
    """Raised for what shards of logits cannot do. No TypeError: a comparison that raises one is False in Python."""


class ShardedLogits(DTensor):
    """A DTensor that is cut on its vocabulary, which functions of torch take beside plain tensors."""

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        if name in DESCRIPTIONS or name in ("grad.__set__", "grad.__delete__", "requires_grad.__set__"):
            return _sharded(super().__torch_function__(func, types, args, kwargs))
        if name in _ADDRESSES or (_changes_in_place(func, name, args, kwargs)):
            raise ShardedLogitsError(f"{name} was called with logits that are cut on the vocabulary; {_WAYS_OUT}")
        if name in FUNCTIONS and kwargs.get("out") is None:
            result = FUNCTIONS[name](func, *tree_map_only(ShardedLogits, _shard_of, (args, kwargs)))
            if result is not NotImplemented:
                return tree_map_only(LogitShard, _join, result)
        if name in ("grad", "backward") and func in (torch.autograd.grad, torch.autograd.backward):
            return tree_map_only(DTensor, _sharded, super().__torch_function__(func, types, args, kwargs))
        log_once(f"{name} of logits that are cut on the vocabulary gathers whole ones on every rank; {_WAYS_OUT}")
        args, kwargs = tree_map_only(DTensor, _whole, (args, kwargs))
        return func(*args, **kwargs)

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """Returns the whole logits, equal on all ranks; differentiable."""
        return _whole(self)


def join_shards(local: Tensor, mesh: DeviceMesh, size: int, dim: int = -1) -> ShardedLogits:
    """Joins the shards [..., vocab / tp] that the ranks of ``mesh`` (one axis) hold of ``size`` logits, as one tensor.

    Args:
        local: [..., vocab / tp], or with the vocabulary at ``dim``.
        mesh: whose ranks hold the shards.
        size: of the vocabulary.
        dim: where ``local`` is cut.
    """
    dim = dim % local.ndim
    shape = torch.Size((*local.shape[:dim], size, *local.shape[dim + 1 :]))
    stride = torch.empty(shape, device="meta").stride()
    logits = _sharded(DTensor.from_local(local, mesh, [Shard(dim)], run_check=False, shape=shape, stride=stride))
    if logits.requires_grad:
        logits.register_hook(partial(_cut, mesh, dim))
    return logits


def _cut(mesh: DeviceMesh, dim: int, gradient: Tensor) -> Tensor:
    """Cut a whole gradient, equal on all ranks, as the logits are: a function of somebody's own returns such ones."""
    if isinstance(gradient, DTensor):
        return gradient
    start, length = shard_bounds(gradient.shape[dim], mesh.size(), mesh.get_local_rank())
    local, shape, stride = gradient.narrow(dim, start, length), gradient.shape, gradient.stride()
    return DTensor.from_local(local.contiguous(), mesh, [Shard(dim)], run_check=False, shape=shape, stride=stride)


def _changes_in_place(func: Callable, name: str, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Tells whether a call would write into sharded logits."""
    if any(isinstance(x, ShardedLogits) for x in tree_leaves(kwargs.get("out"))):
        return True
    first = args[0] if args else kwargs.get("input")
    if not any(isinstance(x, ShardedLogits) for x in tree_leaves(first)):
        return False
    ends = (name.endswith("_") and not name.endswith("__")) or name.endswith((".__set__", ".__delete__"))
    return ends or name in _IN_PLACE or bool(_argument(func, "inplace", args, kwargs))


def _argument(func: Callable, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Find the argument ``name`` in the call of a function that is written in Python."""
    code = getattr(func, "__code__", None)
    names = code.co_varnames[: code.co_argcount] if code else ()
    at = names.index(name) if name in names else len(args)
    return kwargs.get(name, args[at] if at < len(args) else None)


def _shard_of(logits: ShardedLogits) -> LogitShard:
    (placement,) = logits.placements
    assert isinstance(placement, Shard)
    size, mesh = tuple(whole_shape(logits))[placement.dim], logits.device_mesh
    return LogitShard(to_local(logits), placement.dim, size, mesh)


def _join(shard: LogitShard) -> ShardedLogits:
    return join_shards(shard.local, shard.mesh, shard.size, shard.dim)


def _whole(tensor: DTensor) -> Tensor:
    if not isinstance(tensor, ShardedLogits):
        return tensor.full_tensor()
    shard = _shard_of(tensor)
    return gather(shard.local, shard.dim, shard.size, shard.mesh.get_group())


def _sharded(tensor: Any) -> Any:
    """Turn a DTensor into sharded logits with the same data and graph: only torch's own functions make DTensors."""
    if type(tensor) is DTensor:
        tensor.__class__ = ShardedLogits
    return tensor
