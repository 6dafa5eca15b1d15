"""Lets the code after ``from_pretrained`` compute with sharded parameters as with whole ones, one tensor at a time.

Adapters that begin from the weights (PiSSA, OLoRA, DoRA), more tokens, a head that starts from another: what such code
reads of a parameter is gathered for one operation, and what it writes is sliced::

    every rank holds its shard --> gathered (all ranks) --> the operation --> written: rank 0's value --> sliced
"""

import functools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from lightning_automodel._compat.dtensor.tensors import dtensor_from, whole_data_goes_to
from lightning_automodel._compat.peft import whole_layers
from lightning_automodel._compat.torch.pytree import tree_leaves, tree_map
from lightning_automodel.distributed.boxes import boxes_at
from lightning_automodel.distributed.shards import copy_from_whole, gather_on_rank_zero, local_shape, local_tensor
from lightning_automodel.loading.initialize import broadcast

_PARTWISE = frozenset(
    [
        *("detach", "detach_", "requires_grad_", "clone", "contiguous", "empty_like", "zeros_like", "__deepcopy__"),
        *("to", "type", "float", "double", "half", "bfloat16", "cpu", "cuda", "get_device", "is_pinned", "is_shared"),
        *("size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "storage_offset", "__len__"),
        *("is_floating_point", "is_complex", "is_contiguous", "is_inference", "data_ptr", "untyped_storage"),
        *("register_hook", "retain_grad", "__hash__", "__repr__", "__format__", "__reduce_ex__"),
    ]
)
"""Operations that ask for no value, or do to each part what they do to the whole."""

_WRITES = frozenset(f"__{name}__" for name in ("setitem", "iadd", "isub", "imul", "itruediv", "imatmul", "ipow"))


class _WholeValues(TorchFunctionMode):
    paused = 0
    written: ClassVar[set[int]] = set()
    """addresses of shards"""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if _WholeValues.paused or name == "__get__" or name in _PARTWISE or not _sharded((args, kwargs)):
            return func(*args, **kwargs)
        if name == "__set__":
            return self._set(func, *args)
        whole = {id(value): whole_of(value) for value in _sharded((args, kwargs))}
        result = func(*tree_map(lambda x: whole.get(id(x), x), args), **tree_map(lambda x: whole.get(id(x), x), kwargs))
        for target in _targets(name, args, kwargs):
            _write(target, whole[id(target)])
            result = target
        return result

    def _set(self, func: Any, target: Tensor, value: Any) -> None:
        if func.__self__.__name__ != "data" or not isinstance(target, DTensor) or isinstance(value, DTensor):
            func(target, value)
        else:
            _take(target, value)


def was_written(parameter: Tensor) -> bool:
    """Tells whether code within :func:`whole_values` changed values of ``parameter``."""
    local = local_tensor(parameter)
    return local.numel() > 0 and local.untyped_storage().data_ptr() in _WholeValues.written


@contextmanager
def whole_values() -> Generator[None, None, None]:
    """Show operations DTensors with real memory as whole tensors within this context. Collective."""
    _WholeValues.written.clear()
    with whole_data_goes_to(on_shards(_take)), _WholeValues(), whole_layers():
        yield


def on_shards(function: Callable) -> Callable:
    """Runs ``function`` with DTensors as they are, within :func:`whole_values` too."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        _WholeValues.paused += 1
        try:
            return function(*args, **kwargs)
        finally:
            _WholeValues.paused -= 1

    return run


def whole_of(value: DTensor) -> Tensor:
    """Returns the whole tensor on every rank, on the device of the shard. Collective."""
    found = gather_on_rank_zero(value)
    whole = torch.empty(value.shape, dtype=value.dtype) if found is None else found
    broadcast(whole, value.device_mesh)
    return whole.to(local_tensor(value).device)


def _take(target: DTensor, value: Tensor) -> None:
    """Do ``target.data = value`` with a whole ``value``."""
    if value.shape == target.shape:
        _write(target, value)
    else:  # more tokens
        torch.utils.swap_tensors(target, nn.Parameter(_cut_as(target, value), requires_grad=target.requires_grad))


def _write(target: DTensor, whole: Tensor) -> None:
    with torch.no_grad():
        whole = whole.detach().to(target.dtype).clone()
        broadcast(whole, target.device_mesh)  # it may come from random numbers
        copy_from_whole(target, whole)
        _WholeValues.written.add(local_tensor(target).untyped_storage().data_ptr())


def _cut_as(like: DTensor, whole: Tensor) -> DTensor:
    whole = whole.detach().to(like.dtype).contiguous()
    broadcast(whole, like.device_mesh)
    coordinate = like.device_mesh.get_coordinate()
    assert coordinate is not None
    found = boxes_at(whole.shape, like.device_mesh.shape, like.placements, coordinate)
    local = whole.new_empty(local_shape(found, whole.ndim))
    for box in found:
        box.of_local(local).copy_(box.of_whole(whole))
    _WholeValues.written.add(local.untyped_storage().data_ptr())
    return dtensor_from(local, like.device_mesh, tuple(like.placements), whole.shape, whole.stride())


def _sharded(tree: Any) -> list[DTensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, DTensor) and not local_tensor(leaf).is_meta]


def _targets(name: str, args: tuple, kwargs: dict[str, Any]) -> list[DTensor]:
    """Returns the DTensors that an operation writes to."""
    first = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)
    writes = name in _WRITES or (name.endswith("_") and not name.startswith("__"))
    found = [first] if writes else tree_leaves(kwargs.get("out"))
    return [target for target in found if isinstance(target, DTensor)]
