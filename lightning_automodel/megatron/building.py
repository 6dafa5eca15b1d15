"""From a model of transformers to plain parameters in the dtype of compute, which Megatron-FSDP then shards.

::

    split         tensor parallelism with DTensors: transformers reads, or we draw, each rank's slices
    finish_split  plain slices, the loss, the dtype of compute
    apply_levers  activation checkpointing, compilation
"""

from dataclasses import dataclass
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lightning_automodel.activation import apply_activation_checkpointing
from lightning_automodel.blocks import find_blocks
from lightning_automodel.compiling import apply_compile
from lightning_automodel.config import MegatronFSDPConfig
from lightning_automodel.heads import install_loss
from lightning_automodel.loading import cast_parameters
from lightning_automodel.logs import warn_once
from lightning_automodel.megatron.plain import make_plain
from lightning_automodel.plans import Layout, derive_layout, select_plan, validate_tp
from lightning_automodel.plans.selection import has_rules
from lightning_automodel.tensor_parallel import apply_tensor_parallel

_LAYOUT = "_layout_on_tp"


@dataclass(frozen=True, kw_only=True)
class Dtypes:
    """Of one run.

    Attributes:
        compute: parameters during forward and backward passes; ``None``: as the model has them.
        main: what the optimizer updates; ``None``: what computes.
        reduction: of gradients; ``None``: that of ``compute``.
    """

    compute: torch.dtype | None = None
    main: torch.dtype | None = torch.float32
    reduction: torch.dtype | None = None

    def policy(self) -> Any:
        """The library's ``MixedPrecisionPolicy``."""
        from megatron_fsdp import MixedPrecisionPolicy  # optional, and warns of what else it would like

        return MixedPrecisionPolicy(
            main_params_dtype=self.main, main_grads_dtype=self.reduction, grad_comm_dtype=self.reduction
        )


def is_split(model: nn.Module) -> bool:
    """Whether :func:`split` has been called."""
    return _LAYOUT in vars(model)


def split(model: nn.Module, tp_mesh: DeviceMesh, config: MegatronFSDPConfig) -> None:
    """Splits ``model`` in place over ``tp_mesh``; its parameters may be on meta.

    Raises:
        ValueError: if tp does not fit the model, or it has no plan.
    """
    layout: Layout | None = None
    if tp_mesh.size() == 1 and config.tp_plan:
        warn_once("tp_plan of MegatronFSDPConfig: without effect, because tp=1 splits no layer")
    if tp_mesh.size() > 1:
        whole = {name: "replicate" for name, _ in model.named_parameters()}
        rules = config.tp_plan if has_rules(model, config.tp_plan) else whole
        layout = derive_layout(model, select_plan(model, rules), tp_mesh.size())
        validate_tp(model, tp_mesh.size(), layout)
        apply_tensor_parallel(model, tp_mesh, layout)
    vars(model)[_LAYOUT] = layout
    if isinstance(model, PreTrainedModel):
        install_loss(model, tp_mesh, config)


def finish_split(model: nn.Module, tp_mesh: DeviceMesh, dtypes: Dtypes) -> dict[str, Tensor]:
    """Makes parameters plain, and casts them and floating-point inputs, in place.

    Returns:
        the values of parameters before they were cast to a narrower dtype, by name.
    """
    layout = vars(model)[_LAYOUT]
    if layout is not None:
        make_plain(model, layout, tp_mesh)
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    if dtypes.compute is None:
        return {}
    before = {name: parameter.detach() for name, parameter in model.named_parameters()}
    cast_parameters(model, dtypes.compute)
    _cast_inputs(model, dtypes.compute)
    return {
        name: before[name] for name, p in model.named_parameters() if p.dtype.itemsize < before[name].dtype.itemsize
    }


def apply_levers(model: nn.Module, config: MegatronFSDPConfig) -> None:
    """Checkpoints and compiles the blocks of ``model``, in place; a layer without blocks stays as it is.

    Raises:
        ValueError: if ``model`` is one of transformers' and has no blocks for what ``config`` asks for.
    """
    if isinstance(model, PreTrainedModel) or find_blocks(model):
        apply_activation_checkpointing(model, config.activation_checkpointing)
        if config.enable_compile:
            apply_compile(model, backend=config.compile_backend, dynamic=config.compile_dynamic)


def _cast_inputs(model: nn.Module, dtype: torch.dtype) -> None:
    def narrowed(value: Tensor) -> Tensor:
        return value.to(dtype) if value.is_floating_point() else value

    def enter(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return apply_to_collection(args, Tensor, narrowed), apply_to_collection(kwargs, Tensor, narrowed)

    model.register_forward_pre_hook(enter, with_kwargs=True)
