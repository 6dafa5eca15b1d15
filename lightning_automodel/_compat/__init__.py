"""Every use of a private name of torch, lightning or transformers, each with its reason: here, and in this package.

What stands here may break with a new release of these libraries; what stands elsewhere should not.
"""

import inspect
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch._inductor.config
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch._ops import OpOverload, OpOverloadPacket
from torch.distributed._symmetric_memory import enable_symm_mem_for_group
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_init import _move_states_to_device
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor.placement_types import Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils.output_capturing import maybe_install_capturing_hooks

# Documented ways to watch operations and to walk nested outputs, which torch keeps in modules with private names.
# Lightning's timeout, move of optimizer states, DDP hooks: strategies are expected to use them, but none is exported.
__all__ = [
    "OpOverload",
    "OpOverloadPacket",
    "OptimizedModule",
    "StridedShard",
    "TorchDispatchMode",
    "revert_weight_conversion",
    "root_mesh",
    "tree_leaves",
]


def unwrap_compiled(module: OptimizedModule) -> nn.Module:
    """Return what ``torch.compile`` wrapped."""
    return module._orig_mod


def base_of(view: Tensor) -> Tensor | None:
    """Return the tensor that ``view`` is a view of; only a private attribute says so."""
    return view._base


def version_of(tensor: Tensor) -> int:
    """Counts the writes to the memory of ``tensor``; autograd checks by it what it saved, and only privately."""
    return tensor._version


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Returns the mesh that ``mesh`` is a slice of. torch offers no public way to ask."""
    return mesh._get_root_mesh()


def strided_shard(dim: int, groups: int) -> Placement:
    """Makes the placement of a dimension ``dim`` that stacks ``groups`` matrices, of each of which a rank has a shard.

    torch has this placement under a private name: FSDP2 makes it, and transformers' plans need it for fused weights.
    """
    return StridedShard(dim, split_factor=groups)


def recorded_outputs(model: nn.Module, key: str) -> Iterator[tuple[str, nn.Module, int]]:
    """Returns the modules whose output transformers records under ``key`` (such as ``router_logits``), and its index
    there.

    transformers keeps the rule in private registries and installs its hooks with the first forward pass. They are
    installed now, so that hooks of ours can stand before and after them.
    """
    if isinstance(model, PreTrainedModel):
        maybe_install_capturing_hooks(model)
    for name, module in model.named_modules():
        for hook in module._forward_hooks.values():
            if getattr(hook, "__name__", "") == "output_capturing_hook":
                variables = inspect.getclosurevars(hook).nonlocals
                if variables["key"] == key:
                    yield name, module, variables["index"]


def allow_records_in_checkpoints() -> None:
    """Let a compiled graph hold a checkpointed block that records values, such as router logits.

    torch refuses that unless told that a recomputation may leave it out; only a setting of the process says so.
    """
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True


def overlap_in_compiled_graphs(group: dist.ProcessGroup) -> None:
    """Lets inductor fuse the collectives of ``group`` with the matrix products beside them.

    Both the switch of the pass and the registration of a group for symmetric memory are private (torchtitan does this).
    """
    torch._inductor.config._micro_pipeline_tp = True
    enable_symm_mem_for_group(group.group_name)


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


# ---- shards of modules -----------------------------------------------------------------------------------------------


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


def after_backward(callback: Callable[[], None]) -> None:
    """Calls ``callback`` at the end of the running backward pass. FSDP2 does the same; there is no public way."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


# ---- losses ----------------------------------------------------------------------------------------------------------


def assert_async(condition: Tensor, message: str) -> None:
    """Stop the program if ``condition`` is false, without waiting for the device, as torch checks class indices.

    Private, because it ruins the CUDA context; there is no public check without a synchronization.
    """
    torch._assert_async(condition, message)
