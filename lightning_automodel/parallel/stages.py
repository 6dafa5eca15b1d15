"""The stages that make a model parallel, in their order, on one screen; the last one is the strategy's.

::

    plan -> dtype, equal weights -> float8 -> context and tensor parallel -> experts -> loss -> checkpointing
         -> compile -> autocast -> random numbers -> shard

    FSDP2           shards on the meta device; each rank then reads or draws its own part
    DDP             keeps replicas, whose weights were read before, and computes in a narrower dtype
    Megatron-FSDP   waits for the weights of each rank's slices, which the library then shards

What FSDP2 with dp_shard=2 x tp=2 makes of three parameters of a block (rows x columns that a rank holds)::

                               GPU 0        GPU 1        GPU 2        GPU 3
    q_proj [8, 8]              0-7 x 0-7    0-7 x 0-7    0-7 x 0-7    0-7 x 0-7
      tensor parallel          0-3 x 0-7    4-7 x 0-7    0-3 x 0-7    4-7 x 0-7     column-parallel
      shard                    0-1 x 0-7    4-5 x 0-7    2-3 x 0-7    6-7 x 0-7
    o_proj [8, 8]
      tensor parallel          0-7 x 0-3    0-7 x 4-7    0-7 x 0-3    0-7 x 4-7     row-parallel
      shard                    0-3 x 0-3    0-3 x 4-7    4-7 x 0-3    4-7 x 4-7
    input_layernorm [8]
      tensor parallel          0-7          0-7          0-7          0-7           whole
      shard                    0-3          0-3          4-7          4-7
"""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lightning_automodel.config import StageSwitches, resolve_dispatcher, resolve_dtype
from lightning_automodel.distributed.logs import log, warn_once
from lightning_automodel.distributed.random_numbers import RandomNumbers, agreed_seed
from lightning_automodel.loading.initialize import broadcast_weights, cast_parameters
from lightning_automodel.loss.install import install_loss
from lightning_automodel.mesh import Axes
from lightning_automodel.modules.four_bit import store_as_rows
from lightning_automodel.modules.structure import class_names
from lightning_automodel.modules.wrappers import adapters_of
from lightning_automodel.parallel.activation_checkpointing.blocks import apply_activation_checkpointing
from lightning_automodel.parallel.adapters.parameters import compute_adapted_parameters
from lightning_automodel.parallel.compile import apply_compile, assume_no_packing, overlap_tensor_parallel
from lightning_automodel.parallel.context import ContextParallel
from lightning_automodel.parallel.draws.passes import data_rank_of, draw_from
from lightning_automodel.parallel.experts import ExpertParallel
from lightning_automodel.parallel.experts.whole import find_whole_experts, route_to_own_experts
from lightning_automodel.parallel.freed_memory import keep_freed_memory
from lightning_automodel.parallel.lone_parts import run_parts_inside
from lightning_automodel.parallel.precision.autocast import install_autocast
from lightning_automodel.parallel.precision.float8 import apply_float8
from lightning_automodel.parallel.tensor.apply import apply_tensor_parallel, install_copies
from lightning_automodel.plans import Layout, Plan, derive_layout, select_plan, validate_tp
from lightning_automodel.plans.adapters import check_four_bit, check_recomputed_and_compiled
from lightning_automodel.plans.context import derive_context_layout
from lightning_automodel.plans.sequence import SequenceLayout


class Sharding(Protocol):
    """The stage in which the strategies differ: what the ranks that see different samples do with the parameters."""

    def sums_gradients(self, model: nn.Module) -> bool:
        """Tell whether it sums the partial gradients that tensor parallelism leaves in ``model``."""

    def apply(self, model: nn.Module, plan: Plan | None, layout: Layout | None) -> None:
        """Shard ``model`` in place; with tp=1 it has no plan and no layout."""


def apply_stages(
    model: nn.Module, axes: Axes, config: StageSwitches, sharding: Sharding, param_dtype: torch.dtype | None = None
) -> nn.Module:
    """Make ``model`` parallel in place, whatever its class, and return it.

    Args:
        model: with weights (rank 0's count) or on the meta device.
        axes: of the mesh.
        config: the switches of a strategy.
        sharding: the strategy's own stage.
        param_dtype: in which parameters are stored; ``None`` keeps the model's.

    Raises:
        ValueError: if the sizes do not fit the model, it has no plan, or a switch finds nothing to work on.
    """
    tp, cp, device_type = axes.tp.size(), axes.cp.size() if axes.cp else 1, axes.tp.device_type
    _check_whole(model)
    if device_type == "cpu":
        keep_freed_memory()
    store_as_rows(model, tp)
    check_four_bit(model)
    compute_adapted_parameters(model)
    plan, layout = _plan(model, tp, cp, config)
    _store_in(model, param_dtype)
    broadcast_weights(model, axes.tp)
    if config.float8 is not None:
        apply_float8(model, config.float8, tp, device_type)
    experts = ExpertParallel.of(model, axes.experts) if axes.experts else None
    context = _cut_context(model, axes, config)
    if layout is not None:
        _split(model, axes.tp, layout, experts.found if experts else (), is_final=not sharding.sums_gradients(model))
    if experts is not None:
        experts.divide(model, resolve_dispatcher(config.expert_dispatcher))
    if layout is not None:
        install_copies(model, axes.tp.get_group(), layout)  # around what chooses rows for experts
    install_loss(model, axes.tp, config, cuts_rows=context is not None)
    run_parts_inside(model)
    if context is not None:
        context.install_inside()
    if config.enable_async_tensor_parallel:
        overlap_tensor_parallel(axes.tp)
    _recompute(model, config, device_type)
    assume_no_packing(config.patch_is_packed_sequence)
    if config.enable_compile:
        apply_compile(model, backend=config.compile_backend, dynamic=config.compile_dynamic)
    if (dtype := resolve_dtype(config.autocast_dtype)) is not None:
        install_autocast(model, dtype, device_type)
    draw_from(model, RandomNumbers(seed=agreed_seed(device_type), data_rank=data_rank_of(axes.data) // cp))
    sharding.apply(model, plan, layout)
    return model


def _split(model: nn.Module, tp_mesh: DeviceMesh, layout: Layout, apart: Iterable[str], *, is_final: bool) -> None:
    whole = find_whole_experts(model, layout, tp_mesh.size())
    apply_tensor_parallel(model, tp_mesh, layout, is_final=is_final, gathered_alone=apart)
    route_to_own_experts(model, whole, tp_mesh.get_group())


def _cut_context(model: nn.Module, axes: Axes, config: StageSwitches) -> ContextParallel | None:
    if axes.cp is None or axes.cp.size() == 1:
        return None
    layout, group = derive_context_layout(model), axes.cp.get_group()
    context = ContextParallel(model, group, layout, config.cp_balance, config.cp_exchange)
    context.install_outside()
    return context


def _check_whole(model: nn.Module) -> None:
    done = next((name for name, p in model.named_parameters() if isinstance(p, DTensor)), None)
    if done is not None:
        raise ValueError(
            f"{class_names(model)[0]} was made parallel already ({done} is a DTensor); make a model parallel once, or "
            "build it again"
        )


def _plan(model: nn.Module, tp: int, cp: int, config: StageSwitches) -> tuple[Plan, Layout] | tuple[None, None]:
    """Choose the plan, and derive what it means for every parameter."""
    if tp == 1:
        _warn_of_ignored(config)
        return None, None
    plan = select_plan(model, config.tp_plan)
    layout = derive_layout(model, plan, tp, config.sequence_parallel and isinstance(model, PreTrainedModel))
    _check_sequence_parallel(model, config, layout)
    if layout.sequence is not None and cp > 1 and (blocks := _seen_whole(model, layout.sequence)):
        warn_once(
            f"sequence_parallel=True does nothing for {' and '.join(sorted(blocks))} with cp={cp}: they take arguments "
            "of which it is not known which tokens they hold, and see the whole sequence: exact"
        )
        layout = derive_layout(model, plan, tp)
    validate_tp(model, tp, layout)
    return plan, layout


def _seen_whole(model: nn.Module, sequence: SequenceLayout) -> set[str]:
    """List the classes of the blocks that both would cut, of which context parallelism gives some all tokens."""
    whole = derive_context_layout(model).gathered_blocks
    return {class_names(model.get_submodule(name))[0] for names in sequence.block_lists for name in whole & set(names)}


def _warn_of_ignored(config: StageSwitches) -> None:
    given = [n for n, on in (("tp_plan", config.tp_plan), ("sequence_parallel", config.sequence_parallel)) if on]
    if given:
        warn_once(f"{' and '.join(given)} of {type(config).__name__}: without effect, because tp=1 splits no layer")


def _check_sequence_parallel(model: nn.Module, config: StageSwitches, layout: Layout) -> None:
    """Refuses sequence parallelism for a model of another library that is split."""
    if config.sequence_parallel and layout.sequence is None and layout.boundaries:
        raise ValueError(
            "sequence_parallel=True cuts the residual stream of transformers' models only, but "
            f"{type(model).__name__} is none: what else enters its blocks is not known; use sequence_parallel=False"
        )
    if layout.sequence is not None and layout.sequence.mixing:
        warn_once(
            f"sequence_parallel=True does nothing for {' and '.join(sorted(layout.sequence.mixing))}: tokens may meet "
            "in the code of these blocks themselves (attention belongs into a child); their stream stays whole: exact"
        )
    elif layout.sequence is not None and not layout.sequence.block_lists:
        warn_once(f"sequence_parallel=True does nothing for {class_names(model)[0]}: its plan splits no block")


def _store_in(model: nn.Module, dtype: torch.dtype | None) -> None:
    if dtype is not None:
        cast_parameters(model, dtype, wide=adapters_of(model))  # as peft makes them, beside a narrower base
        log(f"{class_names(model)[0]}: parameters are stored in {dtype}")


def _recompute(model: nn.Module, config: StageSwitches, device_type: str) -> None:
    if config.activation_checkpointing and config.enable_compile:
        check_recomputed_and_compiled(model)
    if config.activation_offload and device_type == "cpu":
        raise ValueError("activation_offload=True: on CPU activations are in host memory already; use it on CUDA")
    mode, scope = config.activation_checkpointing, config.activation_checkpointing_scope
    apply_activation_checkpointing(model, mode, scope, offload=config.activation_offload)
