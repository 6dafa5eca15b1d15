"""Private names of FSDP2: its units, their groups of parameters, and what they have not reduced."""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_init import _move_states_to_device
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Shard

from lightning_automodel._compat.fsdp2.waiting import gradient_of, was_gathered, zeros_of
from lightning_automodel._compat.torch.tensors import without_checkpointing_modes

_KEPT = "_kept_gathered"
_TRAINED = "_trained_when_gathered"


def add_parameter_group(
    unit: nn.Module,
    parameters: list[nn.Parameter],
    mp_policy: MixedPrecisionPolicy,
    choose_dim: Callable[[nn.Parameter], Shard | None],
) -> None:
    """Gives an FSDP2 unit one more group of parameters, with a dtype policy of its own.

    FSDP2 keeps several groups per unit (for parameters on different meshes); grouping by dtype is not public.
    """
    state = fully_shard.state(unit)  # type: ignore[attr-defined]
    first = state._fsdp_param_groups[0]
    _move_states_to_device(parameters, [], first.device)
    state._fsdp_param_groups.append(
        FSDPParamGroup(
            parameters,
            first.modules,
            first.mesh_info,
            first.post_forward_mesh_info,
            first.device,
            choose_dim,
            mp_policy,
            first.offload_policy,
        )
    )


def holds_several_dtypes() -> bool:
    """Tells whether a unit can hold parameters of several dtypes: from torch 2.13 on."""
    return hasattr(FSDPState(), "_fsdp_param_groups")


def check_dtypes(dtypes: Sequence[torch.dtype]) -> None:
    """Check that a unit can hold parameters of these dtypes.

    Raises:
        RuntimeError: if this torch holds floating-point parameters of one dtype only.
    """
    if holds_several_dtypes() or (len(dtypes) < 2 and all(x.is_floating_point for x in dtypes)):
        return
    names = " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    raise RuntimeError(
        f"before torch 2.13 FSDP2 shards parameters of one floating-point dtype, and these are {names}; use torch 2.13 "
        "or newer, or store the model in one dtype"
    )


def parameter_groups(unit: Any) -> list[Any]:
    """Returns the groups of parameters of an FSDP2 unit."""
    return parameter_groups_of(fully_shard.state(unit))  # type: ignore[attr-defined]


def parameter_groups_of(state: Any) -> list[Any]:
    """Returns those of a unit's state; before torch 2.13 it has one at most, under another name."""
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [group for group in [state._fsdp_param_group] if group is not None]


def relabel(unit: nn.Module, mesh: DeviceMesh, tp: DeviceMesh, rows: int) -> None:
    """Lets the parameters of an FSDP2 unit say that they are shards of ``rows`` rows over ``mesh``. Nothing moves.

    FSDP2 labels what it shards with the mesh that it shards over, beside that of ``tp`` where it is split over that.
    Here other ranks hold more rows of the same tensor: rank r of the last axis of ``mesh`` has chunk r.
    """
    for group in parameter_groups(unit):
        for held in group.fsdp_params:
            spec = held._sharding_spec
            shape = torch.Size((rows, *spec.shape[1:]))
            meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), held.sharded_param.dtype)
            whole = DeviceMesh._concatenate([mesh, tp]) if held.is_dtensor else mesh
            set_spec(held, DTensorSpec(whole, spec.placements, tensor_meta=meta))
            local = held.to_sharded_dtensor(held.sharded_param._local_tensor)
            new = nn.Parameter(local, requires_grad=held.sharded_param.requires_grad)
            new.__dict__.update(held.sharded_param.__dict__)
            held.sharded_param = new
            held._setattr_on_modules(new)


def set_spec(held: Any, spec: DTensorSpec) -> None:
    """Let FSDP2 label the shards of a parameter, and those of its gradient, with ``spec``."""
    held._sharding_spec = spec
    getattr(held, "_sharding_spec_by_dtype", {}).clear()  # torch 2.15 keeps there what it made of the one before


def gather_unwatched(unit: nn.Module) -> None:
    """Keeps modes of checkpointing from what FSDP2 does around the forward pass of ``unit``.

    A unit inside of a checkpointed block gathers in the forward pass and in the recomputation, but not alike (it may
    have been prefetched), and selective checkpointing counts operations.
    """
    state = fully_shard.state(unit)  # type: ignore[attr-defined]
    for hooks in (unit._forward_pre_hooks, unit._forward_hooks):
        for key, hook in hooks.items():
            if getattr(hook, "__self__", None) is state:
                hooks[key] = partial(_unwatched, hook)


def _unwatched(hook: Callable, *args: Any) -> Any:
    with without_checkpointing_modes():
        return hook(*args)


def watch_outputs(unit: nn.Module, tensors: Sequence[Tensor]) -> None:
    """Lets the backward pass of ``unit`` begin with the gradient of any of ``tensors``, as of what it returned."""
    fully_shard.state(unit)._register_pre_backward_hook(tuple(tensors))  # type: ignore[attr-defined]


def fsdp_units(module: nn.Module) -> list[FSDPModule]:
    """Finds one module of each FSDP2 unit in ``module``, itself included."""
    found = (part for part in module.modules() if isinstance(part, FSDPModule))
    return list({fully_shard.state(part): part for part in found}.values())  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Pending:
    """A parameter of a unit, and what FSDP2 has not reduced of its gradient.

    Attributes:
        parameter: the sharded one, which may wait on the host.
        device: of its gradient.
        gradient: on this rank, summed over the tensor-parallel ranks; ``None`` if it has none.
        zeros: makes what stands for that.
        cut: this rank's shard out of such a tensor.
        groups: over which FSDP2 will average, one after the other.
    """

    parameter: nn.Parameter
    device: torch.device
    gradient: Tensor | None
    zeros: Callable[[], Tensor]
    cut: Callable[[Tensor], Tensor]
    groups: list[ProcessGroup]


def pending_gradients(unit: FSDPModule) -> Iterator[Pending]:
    """Yields what waits in ``unit``, for each parameter.

    FSDP2 keeps it in attributes of its own until the last micro-batch. Collective over the axes right of FSDP2's, where
    the gradient of a whole parameter is a partial sum.
    """
    for group in parameter_groups(unit):
        for held in group.fsdp_params:
            found = gradient_of(held) if was_gathered(held) else None
            yield Pending(
                held.sharded_param,
                group.device,
                None if found is None else held._get_grad_inner_tensor(found),
                partial(zeros_of, held),
                partial(_own_chunk, held=held),
                _groups_of(held.mesh_info),
            )


def unreduced_parameter(units: Iterable[FSDPModule]) -> tuple[nn.Module, str] | None:
    """Find a parameter of ``units`` with a gradient that FSDP2 has not reduced and does not hold for later.

    Returns:
        the module that has it, and its name there.
    """
    for group in (group for unit in units for group in parameter_groups(unit) if group.reduce_grads):
        for held in group.fsdp_params:
            if was_gathered(held) and gradient_of(held) is not None:
                return held._module_info.module, held._module_info.param_name
    return None


def gathered_parameters(unit: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yield what the forward pass of ``unit`` computes with: the module that has a parameter, its name, and what FSDP2
    gathers, of which tp has cut its part.
    """
    for group in parameter_groups(unit):
        for held in group.fsdp_params:
            whole = held.unsharded_param
            local = whole._local_tensor if isinstance(whole, DTensor) else whole
            yield held._module_info.module, held._module_info.param_name, local


def has_replicas(group: Any) -> bool:
    """Tell whether the shards of an FSDP2 parameter group are held by several groups of ranks."""
    replicas = getattr(group.mesh_info, "replicate_process_group", None)
    return replicas is not None and replicas.size() > 1


def _groups_of(mesh: Any) -> list[ProcessGroup]:
    both = (getattr(mesh, name, None) for name in ("shard_process_group", "replicate_process_group"))
    return [group for group in both if group is not None]


def _own_chunk(tensor: Tensor, held: Any) -> Tensor:
    dim, rank = held.fsdp_placement.dim, held.mesh_info.shard_mesh_rank
    chunks = tensor.chunk(held.mesh_info.shard_mesh_size, dim)
    return (chunks[rank] if rank < len(chunks) else tensor.narrow(dim, 0, 0)).reshape(held.sharded_size)


def disagreeing_parameters(model: nn.Module, units: Iterable[FSDPModule]) -> Iterator[nn.Parameter]:
    """Yields the shards whose gathered copy, which waits for a backward pass, says otherwise of ``requires_grad``.

    FSDP2 lets the copy say what the shard says when it gathers. Of a root that is gathered, all ``units`` are seen.
    """
    if all(group.is_sharded for group in parameter_groups(model)):
        return
    for held in _gathered(units):
        if held.unsharded_param.requires_grad != held.sharded_param.requires_grad:
            yield held.sharded_param


def gathered_copies(units: Iterable[FSDPModule]) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield what is gathered now: the module that has it in the place of a shard, its name, and the copy."""
    for held in _gathered(units):
        yield held._module_info.module, held._module_info.param_name, held.unsharded_param


def note_what_trains(units: Iterable[FSDPModule]) -> None:
    """Note of gathered copies whether they require a gradient, for :func:`follow_what_trains`.

    Code that ran within the forward pass (X-LoRA turns its adapters off and on) has met copies of what was gathered,
    and they say with what the pass has computed.
    """
    for held in _gathered(units):
        vars(held)[_TRAINED] = flag = held.unsharded_param.requires_grad
        if held.sharded_param.requires_grad != flag:
            held.sharded_param.requires_grad_(flag)


def follow_what_trains(units: Iterable[FSDPModule]) -> None:
    """Let a shard and its gathered copy say the same of ``requires_grad``: what was set last, on either of them.

    autograd looks at the copy when its gradient comes, as one process looks at the parameter.
    """
    for held in _gathered(units):
        copy, shard = held.unsharded_param, held.sharded_param
        if copy.requires_grad != shard.requires_grad and _TRAINED in vars(held):
            flag = not vars(held)[_TRAINED]
            copy.requires_grad_(flag)
            shard.requires_grad_(flag)
            vars(held)[_TRAINED] = flag  # the next change is from there


def is_copied_from(unit: FSDPModule, shards: set[Tensor]) -> bool:
    """Tell whether ``unit`` holds gathered copies of one of ``shards``."""
    return any(held.sharded_param in shards for held in _gathered([unit]))


def clear_behind_copies(units: Iterable[FSDPModule], copies: set[Tensor], set_to_none: bool) -> None:
    """Clear the gradients of the shards whose gathered ``copies`` modules have in place now, as ``zero_grad`` does."""
    for held in _gathered(units):
        gradient = held.sharded_param.grad
        if gradient is None or held.unsharded_param not in copies:
            continue
        if set_to_none:
            held.sharded_param.grad = None
        else:
            gradient.zero_()


def _gathered(units: Iterable[FSDPModule]) -> Iterator[Any]:
    groups = (group for unit in units for group in parameter_groups(unit) if not group.is_sharded)
    return (held for group in groups for held in group.fsdp_params)


def replaced_parameters(units: Iterable[FSDPModule]) -> Iterator[tuple[nn.Module, str]]:
    """Yields modules that have another tensor in the place of a parameter that FSDP2 shards, with the parameter's name.

    FSDP2 puts its own there in the forward pass.
    """
    for group in (group for unit in units for group in parameter_groups(unit)):
        for held in group.fsdp_params:
            owner, name = held._module_info.module, held._module_info.param_name
            there = owner._parameters.get(name)
            if there is held.sharded_param or there is None:
                continue
            if not _is_gathered(held, there) and not _is_taken_next(group, there):
                yield owner, name


def _is_gathered(held: Any, tensor: Tensor) -> bool:
    copies = (getattr(held, name, None) for name in ("_unsharded_param", "_sharded_post_forward_param"))
    return any(tensor is copy for copy in copies)


def _is_taken_next(group: Any, tensor: Tensor) -> bool:
    """Tell whether FSDP2's first forward pass shards ``tensor``: it takes parameters that were assigned before it."""
    return not group._reset_sharded_params and isinstance(tensor, DTensor) and isinstance(tensor, nn.Parameter)


def holds_partial_sums(unit: FSDPModule) -> bool:
    """Tells whether gradients were reduced within the replicas and wait, flattened, for the reduction among them."""
    return any(group._partial_reduce_output is not None for group in parameter_groups(unit))


def is_kept_gathered(unit: FSDPModule) -> bool:
    """Tells whether a unit is within :func:`kept_gathered`."""
    return _KEPT in vars(unit)


@contextmanager
def kept_gathered(units: Sequence[FSDPModule]) -> Generator[None, None, None]:
    """Keeps the parameters of FSDP2 units gathered after forward passes, within this context.

    FSDP2 sets this publicly, but does not tell what it was before.
    """
    states = [fully_shard.state(unit) for unit in units]  # type: ignore[attr-defined]
    groups = [group for unit in units for group in parameter_groups(unit)]
    automatic = [state._auto_reshard_after_forward for state in states]
    meshes = [group.post_forward_mesh_info for group in groups]
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        vars(unit)[_KEPT] = True
    try:
        yield
    finally:
        for unit in units:
            vars(unit).pop(_KEPT)
        for state, value in zip(states, automatic, strict=True):
            state._auto_reshard_after_forward = value
        for group, mesh in zip(groups, meshes, strict=True):
            group.post_forward_mesh_info = mesh
