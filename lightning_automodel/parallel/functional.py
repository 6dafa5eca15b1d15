"""The functional API of FSDP2 with tensor parallelism, under the names that other tools use; for plain ``torchrun``."""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy

from lightning_automodel._compat.fsdp2.units import fsdp_units, kept_gathered
from lightning_automodel.config import FSDP2Config
from lightning_automodel.loading.host_offload import offload_policy_for
from lightning_automodel.mesh import DP_REPLICATE, DP_SHARD_CP, TP
from lightning_automodel.parallel.activation_checkpointing.blocks import (
    apply_activation_checkpointing,
    get_lm_ac_layers,
)
from lightning_automodel.parallel.compile import compile_blocks
from lightning_automodel.parallel.fsdp2.running import reshard, set_prefetch
from lightning_automodel.parallel.fsdp2.shard_unit import shard_unit
from lightning_automodel.parallel.precision.compute_dtype import find_float32
from lightning_automodel.parallel.registry import run_strategy
from lightning_automodel.parallel.setup import FSDP2Setup
from lightning_automodel.plans.selection import Rules

_LISTS = (nn.ModuleList, nn.ModuleDict)


def fsdp2_strategy_parallelize(
    model: nn.Module,
    device_mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: CPUOffloadPolicy | dict[str, Any] | bool | None = None,
    sequence_parallel: bool = False,
    activation_checkpointing: bool | str = False,
    tp_shard_plan: Rules | str | None = None,
    dp_replicate_mesh_name: str = DP_REPLICATE,
    dp_shard_cp_mesh_name: str = DP_SHARD_CP,
    tp_mesh_name: str = TP,
    enable_async_tensor_parallel: bool = False,
    enable_compile: bool = False,
    enable_fsdp2_prefetch: bool = True,
    fsdp2_backward_prefetch_depth: int = 2,
    fsdp2_forward_prefetch_depth: int = 1,
    reshard_after_forward: bool | int | None = None,
) -> nn.Module:
    """Makes ``model`` tensor-parallel and sharded, in place, as the strategy registered for its class does it.

    Args:
        model: on the meta device (then :func:`~lightning_automodel.loading.materialize` gives each rank its part), or
            with weights, of which rank 0's count.
        device_mesh: with at least the axes ``dp_shard_cp_mesh_name`` and ``tp_mesh_name``, flattened ones included.
        mp_policy: ``None``: compute in bfloat16, reduce in float32.
        offload_policy: parameters wait on the host; see :class:`~lightning_automodel.FSDP2Config`.
        sequence_parallel: cut the residual stream on the sequence over tp.
        activation_checkpointing: compute activations again in the backward pass; see
            :class:`~lightning_automodel.FSDP2Config`.
        tp_shard_plan: rules that replace the model's own plan, or with ``"extends": "model"`` among them complete and
            override it: name pattern to style name or torch ``ParallelStyle``, or the import path of such a dict or of
            a function that returns one.
        dp_replicate_mesh_name: axis over which shards are replicated, if the mesh has it.
        dp_shard_cp_mesh_name: axis over which parameters are sharded.
        tp_mesh_name: axis over which matrices are split.
        enable_async_tensor_parallel: overlap communication and matrix products; turns ``sequence_parallel`` on, and
            needs ``enable_compile``.
        enable_compile: compile each block.
        enable_fsdp2_prefetch: each block asks for others' parameters while it computes.
        fsdp2_backward_prefetch_depth: for how many, in the backward pass.
        fsdp2_forward_prefetch_depth: for how many, in the forward pass.
        reshard_after_forward: ``None``: all blocks but the last of a list.

    Returns:
        the same module.

    Raises:
        ValueError: if the mesh lacks an axis, ``tp`` does not fit the model, it has no plan, or a switch is not
            available.
    """
    setup = FSDP2Setup.from_keywords(
        mp_policy=mp_policy,
        offload_policy=offload_policy,
        sequence_parallel=sequence_parallel,
        activation_checkpointing=activation_checkpointing,
        tp_shard_plan=tp_shard_plan,
        dp_replicate_mesh_name=dp_replicate_mesh_name,
        dp_shard_cp_mesh_name=dp_shard_cp_mesh_name,
        tp_mesh_name=tp_mesh_name,
        enable_async_tensor_parallel=enable_async_tensor_parallel,
        enable_compile=enable_compile,
        enable_fsdp2_prefetch=enable_fsdp2_prefetch,
        fsdp2_backward_prefetch_depth=fsdp2_backward_prefetch_depth,
        fsdp2_forward_prefetch_depth=fsdp2_forward_prefetch_depth,
        reshard_after_forward=reshard_after_forward,
    )
    return run_strategy(model, device_mesh, setup)


def apply_fsdp2_sharding_recursively(
    module: nn.Module,
    mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: CPUOffloadPolicy | dict[str, Any] | bool | None = None,
    enable_fsdp2_prefetch: bool = True,
    fsdp2_backward_prefetch_depth: int = 2,
    fsdp2_forward_prefetch_depth: int = 1,
    reshard_after_forward: bool | int | None = None,
    fully_shard_fn: Callable[..., Any] | None = None,
) -> None:
    """Shards the members of the module lists and dicts below ``module``, each as one FSDP2 unit, in place.

    What is in no list is left to the caller: ``fully_shard(module, ...)`` afterwards.

    Args:
        module: lists may be nested; lists inside of a member belong to the member.
        mesh: of one axis, or two for hybrid sharding (replicas first).
        mp_policy: dtypes of compute and reduction; ``None``: those of the parameters.
        offload_policy: parameters wait on the host; see :class:`~lightning_automodel.FSDP2Config`.
        enable_fsdp2_prefetch: each member asks for others' parameters while it computes.
        fsdp2_backward_prefetch_depth: for how many, in the backward pass.
        fsdp2_forward_prefetch_depth: for how many, in the forward pass.
        reshard_after_forward: ``None``: all but the last member of a list.
        fully_shard_fn: called in place of FSDP2's ``fully_shard``, with the same arguments.

    Raises:
        ValueError: if a switch is not available, or a depth is below 1.
    """
    FSDP2Config(
        fsdp2_backward_prefetch_depth=fsdp2_backward_prefetch_depth,
        fsdp2_forward_prefetch_depth=fsdp2_forward_prefetch_depth,
    )
    mp_policy = mp_policy or MixedPrecisionPolicy()
    in_float32 = find_float32(module)
    offload = offload_policy_for(offload_policy, mesh.device_type)
    members = list(_members(module))
    for member, is_last in members:
        after = not is_last if reshard_after_forward is None else reshard_after_forward
        if fully_shard_fn is not None:
            fully_shard_fn(member, mesh=mesh, mp_policy=mp_policy, reshard_after_forward=after, offload_policy=offload)
        else:
            shard_unit([member], list(member.parameters()), mesh, mp_policy, in_float32, after, offload)
    if enable_fsdp2_prefetch:
        units = [member for member, _ in members if isinstance(member, FSDPModule)]
        set_prefetch(units, units, fsdp2_forward_prefetch_depth, fsdp2_backward_prefetch_depth)


def _members(module: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    """Yield the members of the outermost lists, and whether each is the last of its list."""
    children = list(module.children())
    for i, child in enumerate(children):
        if not isinstance(module, _LISTS) or isinstance(child, _LISTS):
            yield from _members(child)
        elif next(child.parameters(), None) is not None:
            yield child, i == len(children) - 1


def apply_selective_activation_checkpointing(model: nn.Module, enable_compile: bool = False) -> None:
    """Makes blocks of the language model keep, while they train, the results of attention and every second matmul.

    :func:`~lightning_automodel.parallel.activation_checkpointing.blocks.apply_activation_checkpointing` has more.

    Args:
        model: before or after it was made parallel; changed in place.
        enable_compile: compile these blocks as well, with the checkpointing inside of the graph.

    Raises:
        ValueError: if the model has no blocks.
    """
    apply_activation_checkpointing(model, "selective", "language")
    if enable_compile:
        compile_blocks(get_lm_ac_layers(model))


@contextmanager
def unshard_fsdp2_model(model: nn.Module) -> Generator[None, None, None]:
    """Keeps all FSDP2 units of ``model`` gathered over the data ranks, within this context: for many forward passes.

    For generation or log-probabilities; each rank then holds the model as tensor parallelism splits it. Afterwards the
    units are sharded again, and reshard as before. Collective: all ranks enter and leave.
    """
    units = fsdp_units(model)
    with kept_gathered(units):
        for unit in units:
            unit.unshard()
        try:
            yield
        finally:
            reshard(model)
