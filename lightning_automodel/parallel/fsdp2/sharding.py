"""Shards a model over the data ranks with FSDP2: a unit per block, one for the rest, gathered ahead of their use.

Small blocks may share units. The rest is what stands outside of blocks: embedding, final norm, head. It is whole from
the beginning of the forward pass to the end of the backward pass, so embedding and head of a large vocabulary are units
of their own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from transformers import PreTrainedModel

from lightning_automodel._compat.dtensor.gradients import see_to_gradients_of_local
from lightning_automodel._compat.dtensor.tensors import let_data_be_given
from lightning_automodel._compat.fsdp2.root import begin_with_root
from lightning_automodel._compat.fsdp2.units import holds_several_dtypes
from lightning_automodel._compat.torch.groups import concatenated_once
from lightning_automodel._compat.torch.optimization import orthogonalize_whole_matrices
from lightning_automodel._compat.transformers.models import let_layers_be_skipped
from lightning_automodel.checkpointing.hugging_face.save_pretrained import install_saving
from lightning_automodel.config import FSDP2Config
from lightning_automodel.distributed.logs import log
from lightning_automodel.loading.host_offload import offload_policy_for
from lightning_automodel.mesh import Axes
from lightning_automodel.modules.structure import (
    class_names,
    find_large_ends,
    find_towers,
    last_blocks,
    reads_more_than_text,
)
from lightning_automodel.parallel.draws.whole import draw_as_one_process
from lightning_automodel.parallel.experts.units import (
    experts_inside,
    find_expert_units,
    parameters_of_units,
    shard_experts,
)
from lightning_automodel.parallel.fsdp2.gathered import watch_gathered
from lightning_automodel.parallel.fsdp2.over_gloo import communicate_over_gloo
from lightning_automodel.parallel.fsdp2.running import set_prefetch
from lightning_automodel.parallel.fsdp2.shard_unit import FullyShard, shard_unit
from lightning_automodel.parallel.fsdp2.towers import replicate_towers
from lightning_automodel.parallel.fsdp2.units import (
    blocks_of_their_own,
    differentiate_stream,
    group_blocks,
    parameters_of,
    reshards,
)
from lightning_automodel.parallel.generation import generate_in_step
from lightning_automodel.parallel.guards.replica_check import check_replicas_every
from lightning_automodel.parallel.precision.autocast import widen_stream
from lightning_automodel.parallel.precision.compute_dtype import find_float32
from lightning_automodel.parallel.tensor.replicated_gradients import compare_first_gradients
from lightning_automodel.plans import Layout, Plan


@dataclass(frozen=True)
class FSDP2Sharding:
    """The last stage under FSDP2."""

    config: FSDP2Config
    mp_policy: MixedPrecisionPolicy
    axes: Axes
    fully_shard_fn: FullyShard | None = None

    def sums_gradients(self, model: nn.Module) -> bool:
        """Tell whether FSDP2 sums partial gradients: it does unless it holds no parameters."""
        own = self.fully_shard_fn is None
        unneeded = own and needs_no_sharding(model, self.axes.data, self.config, self.mp_policy)
        return self.axes.tp.size() == 1 or not unneeded

    def apply(self, model: nn.Module, plan: Plan | None, layout: Layout | None) -> None:
        """Shard ``model``, or mark it as an FSDP2 module where there is nothing to shard or to cast."""
        let_data_be_given()
        draw_as_one_process()
        orthogonalize_whole_matrices()
        see_to_gradients_of_local(self.axes.data.mesh_dim_names or ())
        if self.sums_gradients(model):
            with concatenated_once():
                apply_fsdp2(model, self.axes, self.config, self.mp_policy, self.fully_shard_fn)
        else:
            mark_as_unit(model, self.axes.data, self.config, self.mp_policy)
        let_layers_be_skipped(model)
        install_saving(model)
        generate_in_step(model, self.axes.data, fills_towers=self.config.tower_policy != "per_layer")
        if isinstance(model, PreTrainedModel):
            model.resize_token_embeddings = MethodType(_refuse_resizing, model)  # type: ignore[method-assign]
        if self.config.check_replicas_every_n_steps is not None:
            check_replicas_every(model, self.config.check_replicas_every_n_steps)
        if layout is not None and not layout.measured:
            compare_first_gradients(model, self.axes.tp)


def _refuse_resizing(model: PreTrainedModel, *args: Any, **kwargs: Any) -> nn.Module:
    if not args and not kwargs:
        return type(model).resize_token_embeddings(model)  # what holds the embeddings, as they are
    raise ValueError(
        f"resize_token_embeddings of a {class_names(model)[0]} that was made parallel already (by from_pretrained in "
        "configure_model, for example); build and resize the model in __init__ of the LightningModule, where it is "
        "still whole"
    )


def apply_fsdp2(
    model: nn.Module,
    axes: Axes,
    config: FSDP2Config,
    mp_policy: MixedPrecisionPolicy,
    fully_shard_fn: FullyShard | None = None,
) -> None:
    """Shards ``model`` in place over the last data axis, and replicates the shards over the first of two.

    Hybrid sharding, dp_replicate=2 x dp_shard=2, of a weight of 8 rows::

                    GPU 0    GPU 1    GPU 2    GPU 3
        replica     0        0        1        1
        stored      0-3      4-7      0-3      4-7
        forward     0-7      0-7      0-7      0-7      all-gather between 0 and 1, and between 2 and 3
        gradient    0-7      0-7      0-7      0-7      each of its own samples
                    0-3      4-7      0-3      4-7      reduce-scatter between 0 and 1, and between 2 and 3
                    0-3      4-7      0-3      4-7      all-reduce between 0 and 2, and between 1 and 3

    Also on one data rank, unless :func:`needs_no_sharding`: every parameter is then a DTensor over the same mesh, which
    is what stock clipping and stock fused optimizers need.

    Raises:
        ValueError: for ``tower_policy="replicate"`` with towers that train, and for ``fsdp2_min_num_params`` without
            blocks.
        RuntimeError: before torch 2.13, for a parameter without dimensions.
    """
    mesh, towers, experts = axes.data, find_towers(model), find_expert_units(model)
    blocks = blocks_of_their_own(model, towers, config)
    replicated = replicate_towers(towers, mp_policy) if config.tower_policy == "replicate" else set()
    elsewhere = replicated | parameters_of_units(experts)
    _check_scalars(model, elsewhere)
    offload = offload_policy_for(config.offload_policy, mesh.device_type)
    inside, in_float32 = policy_of_blocks(model, config, mp_policy), find_float32(model)
    embedding, head = find_large_ends(model)
    grouped = group_blocks(model, blocks, config.fsdp2_min_num_params)
    units = [unit for unit in (embedding, *grouped, head) if unit]
    first_in_backward = last_blocks(model, blocks) | head.keys()
    freed = dict.fromkeys(experts, config.reshard_after_forward)
    for unit in units:
        after = reshards(unit, config, first_in_backward, head)
        shared = [p for p in parameters_of(unit) if p not in elsewhere]
        shard_unit(unit.values(), shared, mesh, inside, in_float32, after, offload, elsewhere, fully_shard_fn)
        freed |= dict.fromkeys(experts_inside(unit, experts), after)
    in_units = {p for unit in units for p in parameters_of(unit)}
    rest = [p for p in model.parameters() if p not in in_units | elsewhere]
    shard_unit([model], rest, mesh, mp_policy, in_float32, None, offload, elsewhere, fully_shard_fn)
    if axes.experts is not None:
        shard_experts(experts, axes, inside, in_float32, offload, freed)
    begin_with_root(model)
    communicate_over_gloo(model, mesh)
    watch_gathered(model)
    if towers or reads_more_than_text(model):
        differentiate_stream(model, towers)
    _leave_free_in_backward(embedding)
    log(f"{class_names(model)[0]}: FSDP2 shards {len(units)} units and the rest over {mesh}, {mp_policy}")
    if config.enable_fsdp2_prefetch:
        depths = config.fsdp2_forward_prefetch_depth, config.fsdp2_backward_prefetch_depth
        forward, backward = ([next(iter(unit.values())) for unit in kind] for kind in (units, grouped))
        nested = {next(iter(unit.values())): list(experts_inside(unit, experts).values()) for unit in units}
        set_prefetch(forward, backward, *depths, inside=nested)


def _leave_free_in_backward(embedding: Mapping[str, nn.Module]) -> None:
    for end in embedding.values():
        assert isinstance(end, FSDPModule)
        end.set_unshard_in_backward(False)  # the gradient of a lookup needs no weight


def _check_scalars(model: nn.Module, elsewhere: set[nn.Parameter]) -> None:
    scalar = next((name for name, p in model.named_parameters() if p.ndim == 0 and p not in elsewhere), None)
    if scalar is not None and not holds_several_dtypes():
        raise RuntimeError(
            f"{scalar} of {class_names(model)[0]} has no dimensions, and before torch 2.13 it cannot stay whole beside "
            "what FSDP2 shards; give it the shape [1], or use torch 2.13, DDPStrategy, or tp on one data rank"
        )


def needs_no_sharding(model: nn.Module, mesh: DeviceMesh, config: FSDP2Config, mp_policy: MixedPrecisionPolicy) -> bool:
    """Tells whether there is one data rank, and nothing is cast or waits on the host: FSDP2 would then only copy.

    On one rank it copies every parameter before its use, and every gradient twice after it. The choice depends on
    nothing that differs between the modules of a run: their parameters are then DTensors over one mesh, which is what
    stock clipping and stock fused optimizers need. Before torch 2.13 it depends on the dtypes of ``model`` where FSDP2
    could not hold them together: adapters in float32 on a narrow base.
    """
    casts = mp_policy.param_dtype is not None or mp_policy.reduce_dtype is not None
    if casts and not holds_several_dtypes():
        casts = not _is_as_cast(model, mp_policy)
    return mesh.size() == 1 and not casts and not config.offload_policy


def _is_as_cast(model: nn.Module, mp_policy: MixedPrecisionPolicy) -> bool:
    """Tell whether ``model`` has several dtypes and the policy would change none, of parameters or of gradients."""
    in_float32 = find_float32(model)
    floats = [p for p in model.parameters() if p.is_floating_point()]
    computes = all(p in in_float32 or p.dtype == (mp_policy.param_dtype or p.dtype) for p in floats)
    reduces = all(p.dtype == (mp_policy.reduce_dtype or p.dtype) for p in floats if p.requires_grad)
    return len({p.dtype for p in floats}) > 1 and computes and reduces


def mark_as_unit(model: nn.Module, mesh: DeviceMesh, config: FSDP2Config, mp_policy: MixedPrecisionPolicy) -> None:
    """Makes ``model`` an FSDP2 module that holds no parameter: its methods work, and outputs are cast."""
    policy_of_blocks(model, config, mp_policy)
    offload = offload_policy_for(config.offload_policy, mesh.device_type)
    shard_unit([model], [], mesh, mp_policy, set(), None, offload, replicated=list(model.parameters()))
    log(f"{class_names(model)[0]}: one data rank and nothing to cast, so FSDP2 holds no parameters")


def policy_of_blocks(model: nn.Module, config: FSDP2Config, mp_policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """Leave ``output_dtype`` out of the policy: it is for what the model returns, and would meet the head's input.

    Autocast takes care of that. Then it is the dtype of the residual stream too, and blocks do not cast what they take.
    """
    if config.autocast_dtype is not None and mp_policy.output_dtype is not None:
        widen_stream(model, mp_policy.output_dtype)
        return replace(mp_policy, output_dtype=None, cast_forward_inputs=False)
    return replace(mp_policy, output_dtype=None)
