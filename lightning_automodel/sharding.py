"""Shards a model over the data ranks with FSDP2: a unit per block, one for the rest, gathered ahead of their use.

Small blocks may share units. The rest is what stands outside of blocks: embedding, final norm, head. It is whole from
the beginning of the forward pass to the end of the backward pass, so embedding and head of a large vocabulary are units
of their own.
"""

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from lightning_automodel._compat import add_parameter_group, reduce_unused_parameters, tree_leaves
from lightning_automodel.autocasting import widen_stream
from lightning_automodel.blocks import (
    class_names,
    find_independent_blocks,
    find_large_ends,
    find_towers,
    is_kept_in_float32,
    last_blocks,
    outermost,
)
from lightning_automodel.config import FSDP2Config
from lightning_automodel.heads import defers_logits
from lightning_automodel.offloading import offload_policy_for


def apply_fsdp2(model: nn.Module, mesh: DeviceMesh, config: FSDP2Config, mp_policy: MixedPrecisionPolicy) -> None:
    """Shards ``model`` in place over the last axis of ``mesh``, and replicates the shards over the first of two axes.

    Also on one data rank, unless :func:`needs_no_sharding`: every parameter is then a DTensor over the same mesh, which
    is what stock clipping and stock fused optimizers need.

    Raises:
        ValueError: for ``tower_policy="replicate"`` with towers that train, and for ``fsdp2_min_num_params`` without
            blocks.
    """
    blocks, towers = find_independent_blocks(model), find_towers(model)
    if config.tower_policy != "per_layer":
        blocks = {name: block for name, block in blocks.items() if outermost(list(towers), name) is None}
    replicated = _replicate(towers, mp_policy) if config.tower_policy == "replicate" else set()
    offload = offload_policy_for(config.offload_policy, mesh.device_type)
    inside = policy_of_blocks(model, config, mp_policy)
    in_float32 = find_float32(model)
    embedding, head = find_large_ends(model)
    grouped = group_blocks(model, blocks, config.fsdp2_min_num_params)
    units = [unit for unit in (embedding, *grouped, head) if unit]
    first_in_backward = last_blocks(model, blocks) | head.keys()  # not worth freeing in between
    read_later = head.keys() if defers_logits(config) else set()  # by the loss, when the head's own forward is over
    for unit in units:
        reshard = config.reshard_after_forward
        if reshard is None:
            reshard = first_in_backward.isdisjoint(unit)
        reshard = reshard if read_later.isdisjoint(unit) else False
        shard_unit(unit.values(), _parameters(unit), mesh, inside, in_float32, reshard, offload)
    in_units = {p for unit in units for p in _parameters(unit)}
    rest = [p for p in model.parameters() if p not in in_units | replicated]
    shard_unit([model], rest, mesh, mp_policy, in_float32, None, offload, replicated)
    if towers:
        # On some ranks a batch may have no images: the projector between tower and language model then has no gradient
        # there, and all ranks must reduce the same parameters.
        reduce_unused_parameters(model)
    for end in embedding.values():
        assert isinstance(end, FSDPModule)
        end.set_unshard_in_backward(False)  # the gradient of a lookup needs no weight
    if config.enable_fsdp2_prefetch:
        depths = config.fsdp2_forward_prefetch_depth, config.fsdp2_backward_prefetch_depth
        forward, backward = ([next(iter(unit.values())) for unit in kind] for kind in (units, grouped))
        set_prefetch(forward, backward, *depths)


def group_blocks(
    model: nn.Module, blocks: dict[str, nn.Module], min_num_params: int | None
) -> list[dict[str, nn.Module]]:
    """The units that ``blocks`` make: one each, or one for as many of a list as hold ``min_num_params``, in order.

    Whole parameters count: all ranks of tensor parallelism must agree. A small rest of a list joins the unit before it.

    Raises:
        ValueError: for a minimum without blocks.
    """
    if min_num_params is not None and not blocks:
        raise ValueError(
            f"fsdp2_min_num_params={min_num_params} groups repeated blocks, and {class_names(model)[0]} has none that "
            "FSDP2 gathers alone; leave it at None"
        )
    units: list[dict[str, nn.Module]] = []
    for _, names in groupby(blocks, key=lambda name: name.rpartition(".")[0]):
        of_list: list[dict[str, nn.Module]] = [{}]
        for name in names:
            if of_list[-1] and _size(of_list[-1]) >= (min_num_params or 0):
                of_list.append({})
            of_list[-1][name] = blocks[name]
        if len(of_list) > 1 and _size(of_list[-1]) < (min_num_params or 0):
            of_list[-2].update(of_list.pop())
        units += of_list
    return units


def _parameters(unit: dict[str, nn.Module]) -> list[nn.Parameter]:
    return [p for module in unit.values() for p in module.parameters()]


def _size(unit: dict[str, nn.Module]) -> int:
    return sum(p.numel() for p in _parameters(unit))


def needs_no_sharding(mesh: DeviceMesh, config: FSDP2Config, mp_policy: MixedPrecisionPolicy) -> bool:
    """Whether there is one data rank, and nothing is cast or waits on the host: FSDP2 would then only copy.

    On one rank it copies every parameter before its use, and every gradient twice after it. The choice depends on
    nothing that differs between the modules of a run: their parameters are then DTensors over one mesh, which is what
    stock clipping and stock fused optimizers need.
    """
    casts = mp_policy.param_dtype is not None or mp_policy.reduce_dtype is not None
    return mesh.size() == 1 and not casts and not config.offload_policy


def mark_as_unit(model: nn.Module, mesh: DeviceMesh, config: FSDP2Config, mp_policy: MixedPrecisionPolicy) -> None:
    """Makes ``model`` an FSDP2 module that holds no parameter: its methods work, and outputs are cast."""
    policy_of_blocks(model, config, mp_policy)
    offload = offload_policy_for(config.offload_policy, mesh.device_type)
    shard_unit([model], [], mesh, mp_policy, set(), None, offload, replicated=list(model.parameters()))


def policy_of_blocks(model: nn.Module, config: FSDP2Config, mp_policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """``output_dtype`` is of what the model returns: after the last block it would meet a head in another dtype.

    Autocast takes care of that. Then it is the dtype of the residual stream too, and blocks do not cast what they take.
    """
    if config.autocast_dtype is not None and mp_policy.output_dtype is not None:
        widen_stream(model, mp_policy.output_dtype)
        return replace(mp_policy, output_dtype=None, cast_forward_inputs=False)
    return replace(mp_policy, output_dtype=None)


def find_float32(model: nn.Module) -> set[nn.Parameter]:
    """Parameters that are stored and used in float32 whatever the policy says.

    Those that the model wants so, and those that are stored so beside others of lower precision: that is on purpose.
    """
    mixed = any(p.is_floating_point() and p.dtype.itemsize < 4 for p in model.parameters())
    return {
        parameter
        for name, parameter in model.named_parameters()
        if is_kept_in_float32(model, name) or (mixed and parameter.dtype == torch.float32)
    }


def shard_unit(
    modules: Iterable[nn.Module],
    parameters: list[nn.Parameter],
    mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy,
    in_float32: set[nn.Parameter],
    reshard: bool | int | None,
    offload: OffloadPolicy,
    replicated: Iterable[nn.Parameter] = (),
) -> None:
    """Makes one FSDP2 unit of ``modules``, with a group of parameters per storage and compute dtype, the largest first.

    FSDP2 gathers and reduces a group as one buffer, so it wants one dtype; casting float32 parameters through bfloat16
    to get it would lose what they are kept in float32 for.
    """
    wide = replace(mp_policy, param_dtype=None)
    groups: dict[tuple[torch.dtype, bool], list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault((parameter.dtype, parameter in in_float32), []).append(parameter)
    ordered = sorted(groups.items(), key=lambda item: -sum(p.numel() for p in item[1]))
    policies = [wide if keep else mp_policy for (_, keep), _ in ordered] or [mp_policy]
    others = [group for _, group in ordered[1:]]
    ignored = {p for group in others for p in group} | set(replicated)
    modules = list(modules)
    origins = [type(module).__module__ for module in modules]
    fully_shard(
        modules,
        mesh=mesh,
        mp_policy=policies[0],
        reshard_after_forward=reshard,
        offload_policy=offload,
        ignored_params=ignored,
    )
    # transformers takes FSDP2's subclass, which lies in torch, for code from the hub, and then initializes differently.
    for module, origin in zip(modules, origins, strict=True):
        type(module).__module__ = origin
        if len(modules) > 1:
            module.register_forward_hook(_gather_for_backward)
    for group, policy in zip(others, policies[1:], strict=True):
        add_parameter_group(modules[0], group, policy)


def _gather_for_backward(module: nn.Module, args: tuple, output: Any) -> None:
    """FSDP2 gathers a unit again with the gradient of its last module's output, which a model may leave unused: the
    features of a tower are often those of an earlier block.
    """
    assert isinstance(module, FSDPModule)
    for value in tree_leaves(output):
        if isinstance(value, Tensor) and value.requires_grad:
            value.register_hook(lambda _: module.unshard())


def _replicate(towers: dict[str, nn.Module], mp_policy: MixedPrecisionPolicy) -> set[nn.Parameter]:
    """Nothing gathers these parameters, so nothing casts them when they are used, and nothing sums their gradients."""
    for name, tower in towers.items():
        check = _FrozenCheck(name)
        check(tower)
        tower.register_forward_pre_hook(check)
    replicated = {p for tower in towers.values() for p in tower.parameters()}
    for parameter in replicated:
        if mp_policy.param_dtype is not None and parameter.is_floating_point():
            parameter.data = parameter.data.to(mp_policy.param_dtype)
    return replicated


@dataclass(frozen=True)
class _FrozenCheck:
    """Before every forward pass of a tower: a callback may unfreeze it in the middle of a run."""

    name: str

    def __call__(self, tower: nn.Module, args: tuple = ()) -> None:
        if torch.is_grad_enabled() and any(p.requires_grad for p in tower.parameters()):
            raise ValueError(
                f'tower_policy="replicate" is for frozen towers, but {self.name} ({type(tower).__name__}) has '
                "parameters that train: their gradients would differ between the data ranks. Use "
                f'tower_policy="root" or "per_layer", or freeze it: {self.name}.requires_grad_(False)'
            )


def set_prefetch(
    forward: Sequence[nn.Module], backward: Sequence[nn.Module], forward_depth: int, backward_depth: int
) -> None:
    """Each unit asks for the next ``forward_depth`` of ``forward`` in the forward pass, and for the ``backward_depth``
    before it in ``backward`` in the backward pass, while it computes. Both are in the order of the forward pass, with
    any one module of a unit.
    """
    for i, unit in enumerate(forward):
        assert isinstance(unit, FSDPModule)
        unit.set_modules_to_forward_prefetch(_units(forward[i + 1 : i + 1 + forward_depth]))
    for i, unit in enumerate(backward):
        assert isinstance(unit, FSDPModule)
        unit.set_modules_to_backward_prefetch(_units(backward[max(0, i - backward_depth) : i][::-1]))


def fsdp_roots(module: nn.Module) -> list[FSDPModule]:
    """The outermost FSDP2 modules in ``module``."""
    if isinstance(module, FSDPModule):
        return [module]
    return [root for child in module.children() for root in fsdp_roots(child)]


def fsdp_units(module: nn.Module) -> list[FSDPModule]:
    """One module of each FSDP2 unit in ``module``, itself included: what works on a unit is done once for its group."""
    found = (part for part in module.modules() if isinstance(part, FSDPModule))
    return list({fully_shard.state(part): part for part in found}.values())  # type: ignore[attr-defined]


@contextmanager
def gradients_held(module: nn.Module, defer: bool = True) -> Generator[None, None, None]:
    """For all micro-batches of a step but the last: within this context a backward pass keeps its gradients to itself.

    Args:
        module: contains FSDP2 models.
        defer: ``FSDP2Config.defer_fsdp_grad_sync``; ``False``: gradients are reduced over the shards, and wait for the
            reduction over the replicas.
    """
    roots = fsdp_roots(module)
    for root in roots:
        root.set_requires_gradient_sync(False) if defer else root.set_requires_all_reduce(False)
    try:
        yield
    finally:
        for root in roots:
            root.set_requires_gradient_sync(True) if defer else root.set_requires_all_reduce(True)


def reshard(module: nn.Module) -> None:
    """Frees what a forward pass without a backward pass left gathered: the roots and the last blocks."""
    for unit in fsdp_units(module):
        unit.reshard()


def _units(modules: Sequence[nn.Module]) -> list[FSDPModule]:
    return [module for module in modules if isinstance(module, FSDPModule)]
