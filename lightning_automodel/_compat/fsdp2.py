"""Private names of FSDP2: its units, their groups of parameters, and what they have not reduced."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_init import _move_states_to_device
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor.placement_types import Shard


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
    if not hasattr(state, "_fsdp_param_groups"):
        raise RuntimeError("a model with parameters of several dtypes needs torch 2.13 or newer; store it in one dtype")
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


def fsdp_units(module: nn.Module) -> list[FSDPModule]:
    """Finds one module of each FSDP2 unit in ``module``, itself included."""
    found = (part for part in module.modules() if isinstance(part, FSDPModule))
    return list({fully_shard.state(part): part for part in found}.values())  # type: ignore[attr-defined]


def pending_gradients(unit: FSDPModule) -> Iterator[tuple[nn.Parameter, Tensor, Callable[[Tensor], Tensor]]]:
    """Yields the gradients that FSDP2 has accumulated in ``unit`` and not reduced.

    FSDP2 keeps it in attributes of its own until the last micro-batch. Collective over the axes right of FSDP2's, where
    the gradient of a whole parameter is a partial sum.

    Yields:
        the sharded parameter; its gradient on this rank, summed over the tensor-parallel ranks; and the function that
        cuts this rank's shard out of such a tensor.
    """
    for group in fully_shard.state(unit)._fsdp_param_groups:  # type: ignore[attr-defined]
        for held in group.fsdp_params:
            unsharded = getattr(held, "_unsharded_param", None)
            if held.unsharded_accumulated_grad is not None:
                gradient = held._get_grad_inner_tensor(held.unsharded_accumulated_grad)
            elif unsharded is not None and unsharded.grad is not None:
                gradient = held._get_grad_inner_tensor(unsharded.grad)
            else:
                continue
            yield held.sharded_param, gradient, partial(_own_chunk, mesh=held.mesh_info, dim=held.fsdp_placement.dim)


def _own_chunk(tensor: Tensor, mesh: Any, dim: int) -> Tensor:
    chunks = tensor.chunk(mesh.shard_mesh_size, dim)
    rank = mesh.shard_mesh_rank
    return chunks[rank] if rank < len(chunks) else tensor.narrow(dim, 0, 0)


def holds_partial_sums(unit: FSDPModule) -> bool:
    """Tells whether gradients were reduced within the replicas and wait, flattened, for the reduction among them."""
    groups = fully_shard.state(unit)._fsdp_param_groups  # type: ignore[attr-defined]
    return any(group._partial_reduce_output is not None for group in groups)


def reduce_unused_parameters(unit: nn.Module) -> None:
    """Let an FSDP2 unit reduce zeros for parameters without a gradient. New in torch 2.13; older ones cannot."""
    setter = getattr(unit, "set_reduce_scatter_unused_params", None)
    if setter is not None:
        setter(True, recurse=False)


@contextmanager
def kept_gathered(units: Sequence[FSDPModule]) -> Generator[None, None, None]:
    """Keeps the parameters of FSDP2 units gathered after forward passes, within this context.

    FSDP2 sets this publicly, but does not tell what it was before.
    """
    states = [fully_shard.state(unit) for unit in units]  # type: ignore[attr-defined]
    groups = [group for state in states for group in state._fsdp_param_groups]
    automatic = [state._auto_reshard_after_forward for state in states]
    meshes = [group.post_forward_mesh_info for group in groups]
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for state, value in zip(states, automatic, strict=True):
            state._auto_reshard_after_forward = value
        for group, mesh in zip(groups, meshes, strict=True):
            group.post_forward_mesh_info = mesh
