"""Makes a model parallel, usable without Lightning: the one function to call, and the names that other tools use.

::

    parallelize                \\
                                 -> FSDP2Setup -> the strategy registered for the model's class -> stages
    fsdp2_strategy_parallelize /
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_automodel.config import FSDP2Config, resolve_mp_policy
from lightning_automodel.config.imports import import_class_from_path, import_classes_from_paths
from lightning_automodel.mesh import AxisNames
from lightning_automodel.parallel.activation_checkpointing.blocks import get_lm_ac_layers
from lightning_automodel.parallel.functional import (
    apply_fsdp2_sharding_recursively,
    apply_selective_activation_checkpointing,
    fsdp2_strategy_parallelize,
    unshard_fsdp2_model,
)
from lightning_automodel.parallel.megatron_fsdp import (
    HAVE_MEGATRON_FSDP,
    megatron_fsdp_strategy_parallelize,
    nvfsdp_strategy_parallelize,
)
from lightning_automodel.parallel.registry import (
    PARALLELIZATION_STRATEGIES,
    DefaultParallelizationStrategy,
    ParallelizationStrategy,
    get_parallelization_strategy,
    register_parallel_strategy,
    run_strategy,
)
from lightning_automodel.parallel.setup import FSDP2Setup
from lightning_automodel.plans.additions import register_tp_plan
from lightning_automodel.plans.torch_styles import (
    get_hf_tp_plan,
    get_hf_tp_shard_plan,
    translate_parallel_style,
    translate_to_torch_parallel_style,
)
from lightning_automodel.plans.validation import validate_tp_mesh, validate_tp_mesh_for_nemotron_nas

HAVE_NVFSDP = HAVE_MEGATRON_FSDP
"""The older name."""

__all__ = [
    "HAVE_MEGATRON_FSDP",
    "HAVE_NVFSDP",
    "PARALLELIZATION_STRATEGIES",
    "DefaultParallelizationStrategy",
    "ParallelizationStrategy",
    "apply_fsdp2_sharding_recursively",
    "apply_selective_activation_checkpointing",
    "fsdp2_strategy_parallelize",
    "get_hf_tp_plan",
    "get_hf_tp_shard_plan",
    "get_lm_ac_layers",
    "get_parallelization_strategy",
    "import_class_from_path",
    "import_classes_from_paths",
    "megatron_fsdp_strategy_parallelize",
    "nvfsdp_strategy_parallelize",
    "parallelize",
    "register_parallel_strategy",
    "register_tp_plan",
    "translate_parallel_style",
    "translate_to_torch_parallel_style",
    "unshard_fsdp2_model",
    "validate_tp_mesh",
    "validate_tp_mesh_for_nemotron_nas",
]


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    config: FSDP2Config | None = None,
    *,
    mp_policy: MixedPrecisionPolicy | None = None,
    param_dtype: torch.dtype | None = None,
    axis_names: AxisNames | None = None,
) -> nn.Module:
    """Makes ``model`` tensor-parallel and sharded, in place, as the strategy registered for its class does it.

    Args:
        model: on the meta device (best: :func:`~lightning_automodel.loading.materialize` or ``from_pretrained`` under
            :func:`~lightning_automodel.loading.sharded_loading` then give each rank its part only), or with real
            weights, of which rank 0's count. One of peft may be around it.
        mesh: from :func:`~lightning_automodel.mesh.build_mesh`, or with axes of ``axis_names``.
        config: the switches; ``None``: all defaults.
        mp_policy: dtypes of compute and reduction where ``config.mp_policy`` does not say.
        param_dtype: dtype in which parameters are stored; ``None`` keeps the model's. Parameters that the model wants
            in float32 and buffers are never cast.
        axis_names: of a mesh of one's own; ``None``: those of ``build_mesh``.

    Returns:
        the same module.

    Raises:
        ValueError: if ``tp`` does not fit the model, or it has no plan.
    """
    config = FSDP2Config.chosen(config)
    policy = resolve_mp_policy(config.mp_policy) or mp_policy or MixedPrecisionPolicy()
    names = axis_names or AxisNames()
    setup = FSDP2Setup(config=config, mp_policy=policy, param_dtype=param_dtype, axis_names=names)
    return run_strategy(model, mesh, setup)
