"""Private names of DTensor: meshes, placements, what is computed from them, shards that wait on the host."""

import functools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor import DTensor, Replicate, _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import Placement
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

from lightning_automodel._compat.dtensor.operations import HANDLERS, by_torch
from lightning_automodel._compat.fsdp2.units import fsdp_units, parameter_groups
from lightning_automodel._compat.torch.tensors import version_of

__all__ = ["StridedShard"]

_WILL_OFFLOAD = "_will_be_offloaded_by_fsdp2"


@register_sharding(torch.ops.aten._is_any_true.default)
def _any_is_of_all_ranks(x: Any) -> list[Any]:
    """Lets ``Trainer(detect_anomaly=True)`` look for NaN in the gradients of DTensors, by an operation that torch
    (2.13) keeps private and has not registered.
    """
    return [([Replicate()], [Replicate()])]


def _item(op_call: Any, args: Any, kwargs: Any) -> Any:
    return args[0].detach().full_tensor().item()


HANDLERS[torch.ops.aten._local_scalar_dense.default] = _item
"""Gives ``float(x)``, ``x.item()`` and ``if x:`` the number of all ranks. torch (2.13) gives each rank that of its own
part of a DTensor (in ``p.grad.norm()`` of the rows that it holds), and has no public way to change that.
"""


def _equal(op_call: Any, args: Any, kwargs: Any) -> Any:
    if args[0].shape != args[1].shape:
        return False
    return by_torch(op_call, *args)


HANDLERS[torch.ops.aten.equal.default] = _equal
"""Lets ``torch.equal`` answer for tensors of different shapes. torch (2.13) brings them to one placement, and fails
where a vector meets columns of a matrix; Lightning's ``BaseFinetuning`` looks for parameters by it.
"""


def _reduced(tensor: DTensor) -> DTensor:
    return tensor.redistribute(placements=[Replicate() if p.is_partial() else p for p in tensor.placements])


def _of_all_ranks(op_call: Any, args: Any, kwargs: Any) -> Any:
    return _reduced(by_torch(op_call, *args, **kwargs))


for _overload in ("default", "dim", "dims"):
    HANDLERS[getattr(torch.ops.aten.any, _overload)] = _of_all_ranks
    HANDLERS[getattr(torch.ops.aten.all, _overload)] = _of_all_ranks
"""Lets ``p.isnan().any().float()`` be 1. torch (2.13) leaves each rank what it has found, to be summed later as a truth
value, and sums numbers if it was made one before: as many as there are ranks that found something.
"""


def _sum(op_call: Any, args: Any, kwargs: Any) -> Any:
    summed, *others = args
    waits_as_norm = any(hasattr(placement, "norm_type") for placement in summed.placements)
    return by_torch(op_call, _reduced(summed) if waits_as_norm else summed, *others, **kwargs)


HANDLERS[torch.ops.aten.sum.default] = HANDLERS[torch.ops.aten.sum.dim_IntList] = _sum
"""Lets ``torch.stack([p.norm() for p in parameters]).sum()`` be the sum of norms, and ``p.norm(dim=0).sum()``. torch
(2.13) keeps norms of each rank's rows apart, and sums those: the norm of sums.
"""


_WAS_GIVEN_DATA = "_was_given_data"  # no weak reference: a tensor that has one cannot be swapped, as Module.to does
_IS_COUNTED = "_counts_writes_through_data"
_times_given = 0
_take_whole: "Callable[[Any, Tensor], None] | None" = None


@functools.cache
def let_data_be_given() -> None:
    """Let ``p.data = value`` give a DTensor the values, as it does to a plain tensor: averages of weights, momentum
    encoders, SAM and others write it so. torch (2.13) changes what the DTensor says of itself, and leaves its memory.
    """
    data: Any = Tensor.data

    def read(tensor: Any) -> Any:
        return tensor.detach() if hasattr(tensor, _IS_COUNTED) else data.__get__(tensor)

    DTensor.data = property(read, functools.partial(_give_data, data.__set__))  # type: ignore[assignment]


@contextmanager
def whole_data_goes_to(take: Callable[[Any, Tensor], None]) -> Generator[None, None, None]:
    """Let ``take(p, value)`` do what ``p.data = value`` means for a plain ``value``, within this context."""
    global _take_whole
    before, _take_whole = _take_whole, take
    try:
        yield
    finally:
        _take_whole = before


def count_writes_through_data(parameter: Tensor) -> None:
    """Let :func:`writes_into` see what is written into ``parameter.data``, which counts for itself in torch, and refuse
    ``parameter.data = value``: for a DTensor whose memory somebody else reads.
    """
    let_data_be_given()
    setattr(parameter, _IS_COUNTED, True)


def _give_data(describe: Callable[[Tensor, Tensor], None], tensor: Any, value: Any) -> None:
    global _times_given
    if hasattr(tensor, _IS_COUNTED):
        raise TypeError(
            "parameter.data = value: Megatron-FSDP gathers from the memory that the parameter has, and would not see "
            "another; write into it, with torch.no_grad(): parameter.copy_(value), and keep a clone of what is to be "
            "put back; or use FSDP2TPStrategy, where parameter.data = value works"
        )
    if not isinstance(value, DTensor):
        if _take_whole is not None:
            return _take_whole(tensor, value)
        raise TypeError(
            "tensor.data = value: the tensor is sharded, and value is a plain one; give its shards: distribute_tensor("
            "value, tensor.device_mesh, tensor.placements, src_data_rank=None) of torch.distributed.tensor"
        )
    if value.shape != tensor.shape:
        raise ValueError(
            f"tensor.data = value: the tensor is sharded and has the shape {tuple(tensor.shape)}, and value has "
            f"{tuple(value.shape)}; shapes can be changed before a model is made parallel, in __init__ for example"
        )
    with torch._C.DisableTorchFunction():  # modes would see shards moved, and this assignment once more
        given: Any = value.redistribute(tensor.device_mesh, tensor.placements).detach()
        describe(tensor, given)
    tensor._local_tensor, tensor._spec = given._local_tensor.contiguous(), given._spec
    setattr(tensor, _WAS_GIVEN_DATA, True)
    _times_given += 1


def times_data_was_given() -> int:
    """Count the ``p.data = value`` on sharded tensors of this process."""
    return _times_given


def take_given_data(model: nn.Module) -> None:
    """Let the FSDP2 units in ``model`` gather from what their parameters were given by ``p.data = value``.

    Raises:
        ValueError: if its dtype is another one, which a unit cannot change.
    """
    for unit in fsdp_units(model):
        for held in (held for group in parameter_groups(unit) for held in group.fsdp_params):
            if not hasattr(held.sharded_param, _WAS_GIVEN_DATA):
                continue
            if held.sharded_param.dtype != held._sharded_param_data.dtype:
                raise ValueError(
                    f"parameter.data = value changed {held._sharded_param_data.dtype} of a sharded parameter into "
                    f"{held.sharded_param.dtype}; the precision of the trainer is the way to train in another dtype"
                )
            unit.reshard()
            held.reset_sharded_param()
            delattr(held.sharded_param, _WAS_GIVEN_DATA)


def writes_into(tensor: Tensor) -> int:
    """Count the writes to ``tensor``, and to the part of a DTensor that this rank holds; 0.1 microseconds."""
    return version_of(tensor) + (version_of(tensor._local_tensor) if isinstance(tensor, DTensor) else 0)


def dtensor_from(
    local: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size, stride: tuple[int, ...]
) -> DTensor:
    """Wraps ``local`` as ``DTensor.from_local`` does, but outside of autograd and without moving it.

    torch's public function moves it to the device of the mesh; FSDP2 makes offloaded shards like this.
    """
    spec = DTensorSpec(mesh, placements, tensor_meta=TensorMeta(torch.Size(shape), tuple(stride), local.dtype))
    return DTensor(local.detach(), spec, requires_grad=False)


def dtensor_like(local: Tensor, like: DTensor) -> DTensor:
    """Returns a DTensor with the mesh, placements and shape of ``like``; dtype and device are those of ``local``."""
    return dtensor_from(local.contiguous(), like.device_mesh, tuple(like.placements), like.shape, like.stride())


def whole_shape(tensor: DTensor) -> torch.Size:
    """Returns the shape of the whole tensor, also of a subclass that watches what is asked of it."""
    return tensor._spec.shape


def is_offloaded(model: nn.Module) -> bool:
    """Tells whether FSDP2 keeps shards of ``model`` on the host, or will; it does not say so publicly."""
    if vars(model).get(_WILL_OFFLOAD):
        return True
    units = (module for module in model.modules() if isinstance(module, FSDPModule))
    groups = (group for unit in units for group in parameter_groups(unit))
    return any(isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups)


def mark_as_offloaded(model: nn.Module, value: bool) -> None:
    """Says of a model that is not yet made parallel whether FSDP2 will keep its shards on the host."""
    vars(model)[_WILL_OFFLOAD] = value


def change_tensors(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Replaces every parameter and buffer of ``module`` by what ``change`` makes of it.

    What ``nn.Module.to`` does, with its hooks (FSDP2 takes notice, metrics move what they hold), but tensor by tensor.
    """
    module._apply(change)


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Returns the mesh that ``mesh`` is a slice of. torch offers no public way to ask."""
    return mesh._get_root_mesh()


def strided_shard(dim: int, groups: int) -> Placement:
    """Makes the placement of a dimension ``dim`` that stacks ``groups`` matrices, of each of which a rank has a shard.

    torch has this placement under a private name: FSDP2 makes it, and transformers' plans need it for fused weights.
    """
    _plan_their_moves()
    return StridedShard(dim, split_factor=groups)


@functools.cache
def _plan_their_moves() -> None:
    """Let torch move DTensors of such placements dim by dim where it takes them for an order of axes, and fails.

    torch 2.13 does so itself; before, ``full_tensor`` of a fused weight is an error.
    """
    if hasattr(_redistribute, "_StridedShardNotDecodableError"):
        return
    planner = _redistribute.DTensorRedistributePlanner
    original = planner.generate_graph_based_transform_infos

    def generate(self: Any, source: DTensorSpec, target: DTensorSpec, shape: Any) -> Any:
        try:
            return original(self, source, target, shape)
        except ValueError:
            return self.generate_greedy_transform_infos(source, target)

    planner.generate_graph_based_transform_infos = generate  # type: ignore[method-assign,assignment]
