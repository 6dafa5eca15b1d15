"""From a model of transformers to plain parameters in the dtype of compute, which Megatron-FSDP then shards.

::

    split_over_tp  the stages, with DTensors: transformers reads, or we draw, each rank's slices
    finish_split   plain slices, the dtype of compute
    sharded.py     the library's buffers
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_automodel.checkpointing.hugging_face.save_pretrained import install_saving
from lightning_automodel.config import MegatronFSDPConfig
from lightning_automodel.loading.initialize import cast_parameters
from lightning_automodel.mesh import Axes
from lightning_automodel.modules.structure import class_names, holds
from lightning_automodel.parallel.generation import generate_in_step
from lightning_automodel.parallel.guards.own_memory import give_own_memory
from lightning_automodel.parallel.layer_config import config_for
from lightning_automodel.parallel.megatron_fsdp.plain import make_plain
from lightning_automodel.parallel.precision.compute_dtype import Cast
from lightning_automodel.parallel.stages import apply_stages
from lightning_automodel.plans import Layout, Plan

_LAYOUT = "_layout_on_tp"


@dataclass(frozen=True, kw_only=True)
class Dtypes:
    """The dtypes of one run.

    Attributes:
        compute: parameters during forward and backward passes; ``None``: as the model has them.
        stored: parameters in the place of ``None`` above; inputs are not cast.
        main: what the optimizer updates; ``None``: what computes.
        reduction: of gradients, and of their sums over micro-batches where the optimizer has such gradients, too;
            ``None``: that of ``compute``.
    """

    compute: torch.dtype | None = None
    stored: torch.dtype | None = None
    main: torch.dtype | None = torch.float32
    reduction: torch.dtype | None = None

    def policy(self, data_size: int) -> Any:
        """Makes the library's ``MixedPrecisionPolicy`` for a number of data ranks."""
        from megatron_fsdp import MixedPrecisionPolicy  # optional, and warns of what else it would like

        sums = self.reduction if self.main == self.reduction else None  # torch refuses gradients of another dtype
        sent = self.reduction if data_size > 1 else sums  # the library adds what one rank has cast to itself
        return MixedPrecisionPolicy(main_params_dtype=self.main, main_grads_dtype=sums, grad_comm_dtype=sent)


def is_split(model: nn.Module) -> bool:
    """Tells whether :func:`split_over_tp` has been called."""
    return _LAYOUT in vars(model)


@dataclass(frozen=True)
class AwaitWeights:
    """The last stage under Megatron-FSDP, which shards values: remembers the layout until :func:`finish_split`."""

    def sums_gradients(self, model: nn.Module) -> bool:
        """Tell that hooks sum partial gradients."""
        return True

    def apply(self, model: nn.Module, plan: Plan | None, layout: Layout | None) -> None:
        """Leave slices of tensor parallelism as DTensors, into which weights can be read."""
        vars(model)[_LAYOUT] = layout
        install_saving(model)


def split_over_tp(model: nn.Module, axes: Axes, config: MegatronFSDPConfig) -> None:
    """Run the stages on ``model`` in place; its parameters may be on meta.

    Raises:
        ValueError: if tp does not fit the model, or it has no plan; for a parameter without dimensions, or of a dtype
            that the library has no buffers for.
    """
    if scalar := next((name for name, parameter in model.named_parameters() if parameter.ndim == 0), None):
        raise ValueError(
            f"{scalar} of {class_names(model)[0]} has no dimensions, and Megatron-FSDP shards rows; use "
            "FSDP2TPStrategy or DDPStrategy, or give it the shape [1]"
        )
    for name, parameter in model.named_parameters():
        if parameter.is_complex() or parameter.dtype == torch.float64:
            raise ValueError(
                f"{name} of {class_names(model)[0]} is stored in {parameter.dtype}, of which Megatron-FSDP reduces no "
                "gradients; use FSDP2TPStrategy or DDPStrategy"
            )
    give_own_memory(model)
    apply_stages(model, axes, config_for(model, config, axes.tp.size()), AwaitWeights())
    if config.zero_dp_strategy == 3:  # below it, parameters stay gathered
        generate_in_step(model, axes.data, fills_towers=False)  # its hooks gather ahead


def finish_split(model: nn.Module, tp_mesh: DeviceMesh, dtypes: Dtypes) -> dict[str, Tensor]:
    """Makes parameters plain, and casts them and floating-point inputs, in place.

    Returns:
        the values of parameters before they were cast to a dtype that rounds them, by name.
    """
    layout = vars(model)[_LAYOUT]
    if layout is not None:
        make_plain(model, layout, tp_mesh)
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    wanted = dtypes.compute or dtypes.stored
    if wanted is None:
        return {}
    before = {name: p.detach() for name, p in model.named_parameters() if p.is_floating_point()}
    cast_parameters(model, wanted)
    if dtypes.compute is not None:
        model.register_forward_pre_hook(Cast(dtypes.compute).inputs, with_kwargs=True)
    now = {name: p.dtype for name, p in model.named_parameters()}
    return {name: value for name, value in before.items() if not holds(now[name], value.dtype)}
