"""The functional API of Megatron-FSDP, under the names that other tools use. The path itself is not available yet."""

import warnings
from importlib.util import find_spec
from typing import Any, NoReturn

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_automodel.mesh import CP, DP, TP
from lightning_automodel.plans.selection import Rules

HAVE_MEGATRON_FSDP = find_spec("megatron_fsdp") is not None

ZERO_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
"""Names of the ZeRO stages 0 to 3."""


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
) -> NoReturn:
    """Will shard ``model`` and ``optimizer`` with Megatron-FSDP, and return both.

    Raises:
        ValueError: always, in this version.
    """
    raise ValueError(
        "Megatron-FSDP is not available in this version; fsdp2_strategy_parallelize shards "
        f"{type(model).__name__} with FSDP2 over the same mesh"
    )


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
) -> Any:
    """The old spelling of :func:`megatron_fsdp_strategy_parallelize`.

    Args:
        data_parallel_sharding_strategy: one of :data:`ZERO_STRATEGIES`.
        cp_mesh_name: ignored; parameters are sharded over ``dp_mesh_name``.

    Raises:
        ValueError: for another sharding strategy, and as the new function does.
    """
    warnings.warn(
        "nvfsdp_strategy_parallelize is deprecated; call megatron_fsdp_strategy_parallelize",
        DeprecationWarning,
        stacklevel=2,
    )
    if data_parallel_sharding_strategy not in ZERO_STRATEGIES:
        raise ValueError(
            f"data_parallel_sharding_strategy={data_parallel_sharding_strategy!r} is not one of "
            f"{', '.join(ZERO_STRATEGIES)}"
        )
    megatron_fsdp_strategy_parallelize(
        model,
        device_mesh,
        optimizer,
        nvfsdp_unit_modules,
        tp_shard_plan,
        ZERO_STRATEGIES.index(data_parallel_sharding_strategy),
        init_nvfsdp_with_meta_device,
        grad_reduce_in_fp32,
        preserve_fp32_weights,
        overlap_grad_reduce,
        overlap_param_gather,
        check_for_nan_in_grad,
        average_in_collective,
        disable_bucketing,
        calculate_per_token_loss,
        keep_fp8_transpose_cache_when_using_custom_fsdp,
        nccl_ub,
        fsdp_double_buffer,
        dp_mesh_name,
        tp_mesh_name,
    )
