"""Megatron-FSDP for loops of one's own, under the names that other tools use. For Lightning: MegatronFSDPStrategy."""

import warnings
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_automodel.config import MegatronFSDPConfig
from lightning_automodel.mesh import CP, DP, TP, axis
from lightning_automodel.parallel.megatron_fsdp import device
from lightning_automodel.plans.selection import Rules

HAVE_MEGATRON_FSDP = find_spec("megatron_fsdp") is not None

NOT_INSTALLED = "megatron-fsdp is not installed; pip install 'lightning_automodel[megatron]'"

ZERO_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
"""Names of the ZeRO stages 0 to 3."""

_OLD_NAMES = {
    "nvfsdp_unit_modules": "megatron_fsdp_unit_modules",
    "init_nvfsdp_with_meta_device": "init_fsdp_with_meta_device",
    "keep_fp8_transpose_cache_when_using_custom_fsdp": "keep_fp8_transpose_cache",
    "dp_mesh_name": "dp_shard_dim",
    "tp_mesh_name": "tp_dim",
}
"""Parameters of :func:`nvfsdp_strategy_parallelize` that are called something else now."""


def megatron_fsdp_strategy_parallelize(
    model: nn.Module,
    device_mesh: DeviceMesh,
    optimizer: Optimizer | None = None,
    megatron_fsdp_unit_modules: list[str] | None = None,
    tp_shard_plan: Rules | str | None = None,
    zero_dp_strategy: int = 3,
    init_fsdp_with_meta_device: bool = False,
    grad_reduce_in_fp32: bool = False,
    preserve_fp32_weights: bool = False,
    overlap_grad_reduce: bool = True,
    overlap_param_gather: bool = True,
    check_for_nan_in_grad: bool = True,
    average_in_collective: bool = False,
    disable_bucketing: bool = False,
    calculate_per_token_loss: bool = False,
    keep_fp8_transpose_cache: bool = False,
    nccl_ub: bool = False,
    fsdp_double_buffer: bool = False,
    dp_shard_dim: str = DP,
    tp_dim: str = TP,
) -> tuple[nn.Module, Optimizer | None]:
    """Shards ``model`` with Megatron-FSDP for a loop of one's own: forward, backward, step, ``zero_grad``.

    Args:
        model: with real weights (those of rank 0 count) or on the meta device (initialized then); in place.
        device_mesh: axes ``dp_shard_dim`` and ``tp_dim``; sizes may be 1.
        optimizer: over ``model.parameters()``; its groups get the sharded parameters. ``None``: build one afterwards.
        megatron_fsdp_unit_modules: as in :class:`~lightning_automodel.MegatronFSDPConfig`, and so the others; the plan
            is its ``tp_plan``.
        preserve_fp32_weights: the optimizer updates float32 copies of narrower parameters.
        dp_shard_dim: axis of ranks that see different samples.
        tp_dim: axis of ranks that split matrices.

    Returns:
        the same model and optimizer. Micro-batches that are not the last of a step: :func:`accumulating`. To clip:
        :func:`clip_grad_norm_` of this package, since ranks may hold no gradient.

    Raises:
        ValueError: for devices other than CUDA, sizes that do not fit, or switches that must not be as they are.
    """
    config = MegatronFSDPConfig(
        megatron_fsdp_unit_modules=megatron_fsdp_unit_modules,
        tp_plan=tp_shard_plan,
        zero_dp_strategy=zero_dp_strategy,
        init_fsdp_with_meta_device=init_fsdp_with_meta_device,
        grad_reduce_in_fp32=grad_reduce_in_fp32,
        preserve_fp32_weights=preserve_fp32_weights,
        overlap_grad_reduce=overlap_grad_reduce,
        overlap_param_gather=overlap_param_gather,
        check_for_nan_in_grad=check_for_nan_in_grad,
        average_in_collective=average_in_collective,
        disable_bucketing=disable_bucketing,
        calculate_per_token_loss=calculate_per_token_loss,
        keep_fp8_transpose_cache=keep_fp8_transpose_cache,
        nccl_ub=nccl_ub,
        fsdp_double_buffer=fsdp_double_buffer,
    )
    if not HAVE_MEGATRON_FSDP:
        raise ValueError(f"{NOT_INSTALLED}, or use fsdp2_strategy_parallelize")
    device.require_cuda(torch.device(device_mesh.device_type if device_mesh is not None else "cpu"))
    from lightning_automodel.parallel.megatron_fsdp.loops import parallelize

    return parallelize(model, axis(device_mesh, dp_shard_dim), axis(device_mesh, tp_dim), config, optimizer)


def accumulating(model: nn.Module) -> AbstractContextManager[None]:
    """Marks backward passes as part of a step that more micro-batches follow, within this context: nothing is
    reduced.
    """
    from lightning_automodel.parallel.megatron_fsdp.loops import accumulating

    return accumulating(model)


def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Scales the gradients of a model in place so that their norm is at most ``max_norm``; the norm before. Collective.

    Args:
        model: that :func:`megatron_fsdp_strategy_parallelize` returned.
        max_norm: the bound; ``inf`` measures only.
    """
    from lightning_automodel.parallel.megatron_fsdp.loops import sharded_of

    return sharded_of(model).norms.clip(model.parameters(), max_norm)


def nvfsdp_strategy_parallelize(
    model: nn.Module,
    device_mesh: DeviceMesh,
    optimizer: Optimizer | None = None,
    nvfsdp_unit_modules: list[str] | None = None,
    tp_shard_plan: Rules | str | None = None,
    data_parallel_sharding_strategy: str = "optim_grads_params",
    init_nvfsdp_with_meta_device: bool = False,
    grad_reduce_in_fp32: bool = False,
    preserve_fp32_weights: bool = False,
    overlap_grad_reduce: bool = True,
    overlap_param_gather: bool = True,
    check_for_nan_in_grad: bool = True,
    average_in_collective: bool = False,
    disable_bucketing: bool = False,
    calculate_per_token_loss: bool = False,
    keep_fp8_transpose_cache_when_using_custom_fsdp: bool = False,
    nccl_ub: bool = False,
    fsdp_double_buffer: bool = False,
    dp_mesh_name: str = DP,
    cp_mesh_name: str = CP,
    tp_mesh_name: str = TP,
) -> tuple[nn.Module, Optimizer | None]:
    """Calls :func:`megatron_fsdp_strategy_parallelize` with the old spelling of its arguments.

    Args:
        data_parallel_sharding_strategy: one of :data:`ZERO_STRATEGIES`.
        cp_mesh_name: ignored; parameters are sharded over ``dp_mesh_name``.

    Raises:
        ValueError: for another sharding strategy, and as the new function does.
    """
    given = locals()  # the arguments, by the names above
    warnings.warn(
        "nvfsdp_strategy_parallelize is deprecated; call megatron_fsdp_strategy_parallelize",
        DeprecationWarning,
        stacklevel=2,
    )
    return megatron_fsdp_strategy_parallelize(**_new_spelling(given))


def _new_spelling(old: dict[str, Any]) -> dict[str, Any]:
    """Rename the arguments of :func:`nvfsdp_strategy_parallelize`."""
    new = {_OLD_NAMES.get(name, name): value for name, value in old.items() if name != "cp_mesh_name"}
    stage = new.pop("data_parallel_sharding_strategy")
    if stage not in ZERO_STRATEGIES:
        raise ValueError(f"data_parallel_sharding_strategy={stage!r} is not one of {', '.join(ZERO_STRATEGIES)}")
    return {**new, "zero_dp_strategy": ZERO_STRATEGIES.index(stage)}
