"""The stages that make a model parallel, in their order, on one screen."""

from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lightning_automodel.activation import apply_activation_checkpointing
from lightning_automodel.autocasting import install_autocast
from lightning_automodel.blocks import class_names
from lightning_automodel.compiling import apply_compile, assume_no_packing, overlap_tensor_parallel
from lightning_automodel.config import DDPConfig, FSDP2Config, resolve_dtype
from lightning_automodel.float8 import apply_float8
from lightning_automodel.heads import install_loss
from lightning_automodel.loading import broadcast_weights, cast_parameters
from lightning_automodel.logs import warn_once
from lightning_automodel.mesh import AxisNames, find_axes
from lightning_automodel.plans import Layout, derive_layout, select_plan, validate_tp
from lightning_automodel.replicas import compare_first_gradients
from lightning_automodel.sharding import apply_fsdp2, mark_as_unit, needs_no_sharding
from lightning_automodel.tensor_parallel import apply_tensor_parallel


def apply_stages(
    model: nn.Module,
    mesh: DeviceMesh,
    config: FSDP2Config,
    mp_policy: MixedPrecisionPolicy,
    param_dtype: torch.dtype | None,
    axis_names: AxisNames,
) -> nn.Module:
    """Makes ``model`` parallel in place, whatever its class; see :func:`~lightning_automodel.parallelizer.parallelize`.

    Raises:
        ValueError: if the sizes do not fit the model, or it has no plan.
    """
    tp_mesh, fsdp_mesh = find_axes(mesh, axis_names)
    tp = tp_mesh.size()
    is_alone = tp > 1 and needs_no_sharding(fsdp_mesh, config, mp_policy)
    _check_whole(model)
    if tp == 1:
        _warn_of_ignored(config)
    if tp > 1:
        plan = select_plan(model, config.tp_plan)
        layout = derive_layout(model, plan, tp, config.sequence_parallel and isinstance(model, PreTrainedModel))
        _check_sequence_parallel(model, config, layout)
        validate_tp(model, tp, layout)
    if param_dtype is not None:
        cast_parameters(model, param_dtype)
    broadcast_weights(model, mesh)
    if config.float8 is not None:
        apply_float8(model, config.float8, tp, tp_mesh.device_type)
    if tp > 1:
        apply_tensor_parallel(model, tp_mesh, layout, is_final=is_alone)
    install_loss(model, tp_mesh, config)
    if config.enable_async_tensor_parallel:
        overlap_tensor_parallel(tp_mesh)
    apply_levers(model, config, tp_mesh.device_type)
    if is_alone:
        mark_as_unit(model, fsdp_mesh, config, mp_policy)
    else:
        apply_fsdp2(model, fsdp_mesh, config, mp_policy)
    if isinstance(model, PreTrainedModel):
        model.resize_token_embeddings = MethodType(_refuse_resizing, model)  # type: ignore[method-assign]
    if tp > 1 and not plan.measured:
        compare_first_gradients(model, tp_mesh)
    return model


def _check_whole(model: nn.Module) -> None:
    done = next((name for name, p in model.named_parameters() if isinstance(p, DTensor)), None)
    if done is not None:
        raise ValueError(
            f"{class_names(model)[0]} was made parallel already ({done} is a DTensor); make a model parallel once, or "
            "build it again"
        )


def _refuse_resizing(model: PreTrainedModel, *args: Any, **kwargs: Any) -> nn.Module:
    if not args and not kwargs:
        return type(model).resize_token_embeddings(model)  # what holds the embeddings, as they are
    raise ValueError(
        f"resize_token_embeddings of a {class_names(model)[0]} that was made parallel already (by from_pretrained in "
        "configure_model, for example); build and resize the model in __init__ of the LightningModule, where it is "
        "still whole"
    )


def _warn_of_ignored(config: FSDP2Config) -> None:
    given = [n for n, on in (("tp_plan", config.tp_plan), ("sequence_parallel", config.sequence_parallel)) if on]
    if given:
        warn_once(f"{' and '.join(given)} of FSDP2Config: without effect, because tp=1 splits no layer")


def _check_sequence_parallel(model: nn.Module, config: FSDP2Config, layout: Layout) -> None:
    """A model of another library that is split; single layers beside a model are whole and see the whole sequence."""
    if config.sequence_parallel and layout.sequence is None and layout.boundaries:
        raise ValueError(
            "sequence_parallel=True cuts the residual stream of transformers' models only, but "
            f"{type(model).__name__} is none: what else enters its blocks is not known; use sequence_parallel=False"
        )
    if layout.sequence is not None and not layout.sequence.block_lists:
        warn_once(f"sequence_parallel=True does nothing for {class_names(model)[0]}: its plan splits no block")


def apply_levers(model: nn.Module, config: FSDP2Config | DDPConfig, device_type: str) -> None:
    """What is the same whatever the strategy: activation checkpointing, compilation around it, autocast around all.

    Raises:
        ValueError: if there is nothing that it would change.
    """
    if config.activation_offload and device_type == "cpu":
        raise ValueError("activation_offload=True: on CPU activations are in host memory already; use it on CUDA")
    mode, scope = config.activation_checkpointing, config.activation_checkpointing_scope
    apply_activation_checkpointing(model, mode, scope, offload=config.activation_offload)
    assume_no_packing(model, config.patch_is_packed_sequence)
    if config.enable_compile:
        apply_compile(model, backend=config.compile_backend, dynamic=config.compile_dynamic)
    if (dtype := resolve_dtype(config.autocast_dtype)) is not None:
        install_autocast(model, dtype, device_type)
