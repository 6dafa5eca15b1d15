"""Makes a model parallel: the whole sequence of stages on one screen, usable without Lightning."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_automodel.config import FSDP2Config, resolve_mp_policy
from lightning_automodel.loading import broadcast_weights, cast_parameters
from lightning_automodel.mesh import TP, axis
from lightning_automodel.plans import derive_layout, select_plan, validate_tp
from lightning_automodel.sharding import apply_fsdp2
from lightning_automodel.tensor_parallel import apply_tensor_parallel


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    config: FSDP2Config | None = None,
    *,
    mp_policy: MixedPrecisionPolicy | None = None,
    param_dtype: torch.dtype | None = None,
) -> nn.Module:
    """Makes ``model`` tensor-parallel and sharded, in place.

    Args:
        model: on the meta device (best: :func:`~lightning_automodel.loading.materialize` or ``from_pretrained`` under
            :func:`~lightning_automodel.loading.sharded_loading` then give each rank its part only), or with real
            weights, of which rank 0's count.
        mesh: from :func:`~lightning_automodel.mesh.build_mesh`.
        config: the switches; ``None``: all defaults.
        mp_policy: dtypes of compute and reduction where ``config.mp_policy`` does not say.
        param_dtype: dtype in which parameters are stored; ``None`` keeps the model's. Parameters that the model wants
            in float32 and buffers are never cast.

    Returns:
        the same module.

    Raises:
        ValueError: if ``tp`` does not fit the model, or it has no plan.
    """
    config = config or FSDP2Config()
    tp_mesh = axis(mesh, TP)
    if tp_mesh.size() > 1:
        plan = select_plan(model, config.tp_plan)
        validate_tp(model, tp_mesh.size())
        layout = derive_layout(model, plan, tp_mesh.size(), config.sequence_parallel)
    if param_dtype is not None:
        cast_parameters(model, param_dtype)
    broadcast_weights(model, mesh)
    if tp_mesh.size() > 1:
        apply_tensor_parallel(model, tp_mesh, layout)
    apply_fsdp2(model, mesh, config, resolve_mp_policy(config.mp_policy) or mp_policy or MixedPrecisionPolicy())
    return model
