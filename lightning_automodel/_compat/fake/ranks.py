"""Private names of torch with which one CPU process plays a rank of any run: fake groups, and tensors without memory.

::

    torch.nn.Linear, optimizers, FSDP2      see tensors on the device that is played
        Surface (functions)                 device of DTensors, moves between devices, values that are looked at
        Route (operations)                  what has no fake tensor in it runs for real: meshes, modules on meta
        Shapes (FakeTensorMode)             shapes, dtypes, devices; an operation over two devices is an error
    autograd, kernels                       see the CPU, for which every build of torch is made
"""

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.autograd.graph import _engine_run_backward
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._tools.fake_collectives import CollectiveOp, collective_ops, sync_ops
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._redistribute import _gen_transform_infos
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.nn import functional as F
from torch.nn.attention.bias import CausalBias
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves
from transformers.utils import import_utils

from lightning_automodel._compat.fake.cuda import (
    ASKS_DEVICE,
    CPU,
    device_for_kernels,
    keep_where_it_is,
    replaced,
    told_to_autograd,
    without_cuda,
)
from lightning_automodel._compat.fake.shapes import Shapes, all_selected
from lightning_automodel._compat.torch.groups import group_of_name
from lightning_automodel._compat.torch.tensors import EagerMode, is_in_backward

aten = torch.ops.aten
_READS: dict[Any, Callable[[Any], Any]] = {
    Tensor.__int__: int,
    Tensor.__index__: int,
    Tensor.__bool__: bool,
    Tensor.__float__: float,
    Tensor.item: lambda value: value,
}
_PLAIN = Tensor.__torch_function__.__func__  # type: ignore[attr-defined]
_AS_SUBCLASS = Tensor.as_subclass
_PLACES = (Tensor.device, Tensor.is_cuda)
_GETTERS = {place.__get__ for place in _PLACES}  # type: ignore[union-attr]
_MOVES = (Tensor.to, Tensor.cuda, Tensor.cpu, Tensor.type_as)
_SHOWN = {*_READS, *_GETTERS, *_MOVES, Tensor.backward, F.one_hot, F.scaled_dot_product_attention}
_moves: list[Tensor] = []
"""What Python moves to another device at this moment."""
_HOLDS = (aten.all.default, aten.all.dim, aten.eq.Scalar, aten.eq.Tensor, aten.equal.default)
_DRAWS = (aten.randint.default, aten.randint.low, aten.rand.default)
_WRAPPERS = (DTensor, AsyncCollectiveTensor)


def packet_of(operation: Any) -> Any:
    """Returns what the overloads of an operation have in common, by which torch counts FLOPs."""
    return getattr(operation, "_overloadpacket", None)


def key_of(storage: torch.UntypedStorage) -> int:
    """Returns a number that no other living storage has."""
    return storage._cdata


def is_wrapper(kinds: Sequence[type]) -> bool:
    """Tells whether an operation has tensors that consist of others, on which it will run."""
    return any(map(_wraps, kinds))


@cache
def _wraps(kind: type) -> bool:
    return issubclass(kind, _WRAPPERS)


def group_of(operation: Any, args: tuple) -> "dist.ProcessGroup | None":
    """Returns the group of a collective operation; ``None``: it is none, or waits for one only."""
    if operation.namespace == "lightning_automodel":  # messages of ours, over gloo
        return group_of_name(args[-1])
    if operation not in collective_ops or operation in sync_ops:
        return None
    return CollectiveOp.get_process_group(operation, args)


@contextmanager
def fake_world(size: int, rank: int = 0) -> Generator[None, None, None]:
    """Be ``rank`` of ``size`` processes within this context; collectives return at once and change nothing.

    Raises:
        RuntimeError: if this process has process groups already.
    """
    if dist.is_initialized():
        raise RuntimeError("this process has process groups already; plan a run in a process of its own")
    _forget_meshes()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _forget_meshes()


def _forget_meshes() -> None:
    """Clear what DTensor keeps by mesh: one of the same sizes, whose groups have ended, would be taken for the next."""
    _clear_sharding_prop_cache()
    _gen_transform_infos.cache_clear()


@contextmanager
def fake_device(device_type: str) -> Generator[None, None, None]:
    """Make tensors without memory within this context, on a device that need not be there.

    Tensors on meta stay what they are, and so does what is computed of real tensors alone.
    """
    with ExitStack() as stack:
        stack.enter_context(replaced(import_utils, "is_fake_tensor", lambda tensor: False))
        stack.enter_context(replaced(Tensor, "as_subclass", _as_subclass))
        stack.enter_context(replaced(CausalBias, "__new__", staticmethod(_plain_bias)))
        stack.enter_context(told_to_autograd())
        if device_type == "cuda":
            stack.enter_context(without_cuda())
        stack.enter_context(_Surface(device_type))
        stack.enter_context(Shapes(allow_non_fake_inputs=True))
        stack.enter_context(_Route(device_type))
        yield


def _plain_bias(kind: type[Tensor], *args: Any) -> Tensor:
    """Make a mask that is known by its kind without any mode: it holds no values."""
    with _disable_current_modes():
        return Tensor.__new__(kind)


def _as_subclass(tensor: Tensor, kind: type[Tensor]) -> Tensor:
    """Make what stands for a fake tensor, which cannot have two classes: nobody looks at the values of such ones."""
    if isinstance(tensor, FakeTensor):
        with unset_fake_temporarily():
            tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return _AS_SUBCLASS(tensor, kind)


# ---- which operations have memory ------------------------------------------------------------------------------------


class _Route(EagerMode):
    """Lets operations on real tensors run for real, and answers what fake ones cannot."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.is_cuda = device_type == "cuda"

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is ASKS_DEVICE:
            return device_for_kernels(args)
        if is_wrapper(types):
            return NotImplemented
        if func is aten._local_scalar_dense.default:
            return _value_of(args[0])
        has_fakes = FakeTensor in types
        if not has_fakes and not _makes_fake(func, args, kwargs):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if self.is_cuda and (kwargs.get("device") == CPU or not has_fakes):
            kwargs = _where_it_was(func, args, kwargs)
        if func is aten.equal.default:
            return True
        if func is aten.histc.default:
            return args[0].new_empty((args[1],))
        if func is aten.nonzero.default:
            return args[0].new_empty((args[0].numel(), args[0].ndim), dtype=torch.int64)
        if func is aten.index.Tensor:
            args = (args[0], all_selected(args[1]), *args[2:])
        out = func(*args, **kwargs)
        if self.is_cuda and has_fakes and not _moves and "device" not in kwargs:
            keep_where_it_is(out, args)
        if func in _HOLDS and isinstance(out, FakeTensor):
            out._holds = True  # type: ignore[attr-defined]
        return out


def _makes_fake(func: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Tells whether an operation without fake tensors makes one."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    device = kwargs.get("device")
    if tensors:
        to_device = device is not None and torch.device(device).type != "meta"
        return func is aten.lift_fresh.default or (to_device and any(t.is_meta for t in tensors)) or _is_cuda(device)
    if device is not None and torch.device(device).type == "meta":
        return False
    return not (func in _DRAWS and not tree_leaves(args[-1]))  # a seed: the host looks at it


def _where_it_was(func: Any, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Correct the device that torch's own code asks for: it takes every tensor for one on the CPU."""
    if kwargs.get("device") not in (None, CPU):
        return kwargs
    is_backward = is_in_backward()
    if any(isinstance(x, Tensor) for x in tree_leaves((args, kwargs))):
        is_meant = _moves or not (is_backward or func is aten._to_copy.default)
        return kwargs if is_meant else {key: value for key, value in kwargs.items() if key != "device"}
    if not is_backward or "device" not in _arguments(func):
        return kwargs
    return {**kwargs, "device": torch.device("cuda", 0)}


@cache
def _arguments(func: Any) -> set[str]:
    return {argument.name for argument in func._schema.arguments}


def _is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def _value_of(tensor: Any) -> Any:
    """Answers a look at a value: what must hold for all holds, what is counted is zero."""
    constant = getattr(tensor, "constant", None)
    if constant is not None or not isinstance(tensor, FakeTensor):
        with unset_fake_temporarily():
            return (tensor if constant is None else constant).item()
    if tensor.dtype == torch.bool:
        return getattr(tensor, "_holds", False)
    return 0.0 if tensor.is_floating_point() else 0


# ---- what Python sees ------------------------------------------------------------------------------------------------


class _Surface(TorchFunctionMode):
    """Shows Python the device that is played, where torch's own code would see the CPU."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.device = torch.device("cuda", 0) if device_type == "cuda" else CPU

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func not in _SHOWN:
            return func(*args, **kwargs)
        first = args[0]
        if isinstance(first, FakeTensor):
            if func in _READS:
                return _READS[func](_value_of(first))
            if func is Tensor.backward:
                return self._backward(first, *args[1:], **kwargs)
            if func is F.one_hot and self.device != CPU:  # its own code makes numbers to compare with on the CPU
                classes = args[1] if len(args) > 1 else kwargs["num_classes"]
                return first.new_zeros((*first.shape, classes))
            if func in _MOVES:
                return _move(func, first, args[1:], kwargs)
            if func is F.scaled_dot_product_attention and self.device != CPU:
                return _attention(func, args, kwargs)
        if func in _GETTERS:
            return self._place(func, args)
        return func(*args, **kwargs)

    def _backward(
        self,
        tensor: Tensor,
        gradient: Any = None,
        retain_graph: Any = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """Run a backward pass in which this mode is on: hooks and recomputations are Python too."""
        gradient = torch.ones_like(tensor) if gradient is None else gradient
        keep = create_graph if retain_graph is None else retain_graph
        with self:
            _engine_run_backward(
                (tensor,), (gradient,), keep, create_graph, inputs or (), allow_unreachable=True, accumulate_grad=True
            )

    def _place(self, getter: Any, args: tuple) -> Any:
        tensor = args[0]._local_tensor if isinstance(args[0], DTensor) else args[0]
        if isinstance(tensor, FakeTensor):
            device = tensor.device
        elif getattr(type(tensor).__torch_function__, "__func__", _PLAIN) is not _PLAIN:
            device = self.device  # it stands for logits
        else:
            return getter(*args)
        return device if getter.__self__ is Tensor.device else device.type == "cuda"


def _move(func: Any, tensor: FakeTensor, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """Move a tensor between devices that only Python can tell apart."""
    kwargs = {key: value for key, value in kwargs.items() if key != "copy"}
    if func is Tensor.cpu or func is Tensor.cuda:
        device: Any = CPU if func is Tensor.cpu else torch.device("cuda")
        dtype = tensor.dtype
    elif func is Tensor.type_as:
        device, dtype = args[0].device, args[0].dtype
    elif (other := args[0] if args else kwargs.get("other")) is not None and isinstance(other, Tensor):
        device, dtype = other.device, other.dtype
    else:
        device, dtype = torch._C._nn._parse_to(*args, **kwargs)[:2]
        dtype = dtype or tensor.dtype
    if device is None or device.type == tensor.device.type:
        return tensor if dtype == tensor.dtype else Tensor.to(tensor, dtype)
    _moves.append(tensor)
    try:
        return aten._to_copy(tensor, dtype=dtype, device=device)
    finally:
        _moves.pop()


def _attention(func: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """Run the kernel that CUDA would choose: none holds the weights of attention, and that for the CPU only might."""
    query, key, value = args[:3]
    mask, dropout = kwargs.get("attn_mask", args[3] if len(args) > 3 else None), kwargs.get("dropout_p", 0.0)
    scale = kwargs.get("scale") or 1.0 / math.sqrt(query.shape[-1])
    if kwargs.get("enable_gqa") and query.shape[1] != key.shape[1]:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    causal = bool(kwargs.get("is_causal", False))
    if isinstance(mask, CausalBias):
        mask, causal = None, True
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -math.inf)
    if mask is not None:
        mask = mask.expand(*query.shape[:-1], key.shape[-2])
    same = query.shape[-1] == value.shape[-1] <= 256 and query.dtype.itemsize == 2
    if mask is None and same:
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout, causal, scale=scale)[0]
    saves = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    return aten._scaled_dot_product_efficient_attention(query, key, value, mask, saves, dropout, causal, scale=scale)[0]
