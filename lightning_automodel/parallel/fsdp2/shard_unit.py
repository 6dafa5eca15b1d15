"""Makes one FSDP2 unit of modules: what is gathered, freed and reduced together."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from lightning_automodel._compat.fsdp2.failures import go_on_after_failures
from lightning_automodel._compat.fsdp2.gathers import gather_trainable
from lightning_automodel._compat.fsdp2.in_place import use_in_place
from lightning_automodel._compat.fsdp2.reduction import reduce_what_any_rank_has
from lightning_automodel._compat.fsdp2.scalars import Place, keep_scalars_whole, rows_of_scalar
from lightning_automodel._compat.fsdp2.units import add_parameter_group, check_dtypes, watch_outputs
from lightning_automodel._compat.torch.modules import own_parameters
from lightning_automodel._compat.torch.pytree import tree_leaves
from lightning_automodel._compat.transformers.models import record_as_before
from lightning_automodel.parallel.fsdp2.dim_to_cut import DimToCut
from lightning_automodel.parallel.given_containers import keep_given_containers
from lightning_automodel.parallel.guards.gather_order import note_reduction
from lightning_automodel.parallel.guards.written_weights import refuse_written_weights
from lightning_automodel.parallel.hidden_outputs import watch_hidden_outputs

FullyShard = Callable[..., Any]
"""As FSDP2's ``fully_shard(module, mesh=, mp_policy=, reshard_after_forward=, offload_policy=, ignored_params=)``."""


def shard_unit(
    modules: Iterable[nn.Module],
    parameters: list[nn.Parameter],
    mesh: DeviceMesh,
    mp_policy: MixedPrecisionPolicy,
    in_float32: set[nn.Parameter],
    reshard: bool | int | None,
    offload: OffloadPolicy,
    replicated: Iterable[nn.Parameter] = (),
    fully_shard_fn: FullyShard | None = None,
) -> None:
    """Makes one FSDP2 unit of ``modules``, with a group of parameters per storage and compute dtype, the largest first.

    FSDP2 gathers and reduces a group as one buffer, so it wants one dtype; casting float32 parameters through bfloat16
    to get it would lose what they are kept in float32 for. Parameters without dimensions stay whole on each rank.
    ``fully_shard_fn`` is called in place of FSDP2's own, with a module, or a list where a unit has several.
    """
    modules, ranks = list(modules), mesh.size(mesh.ndim - 1)
    groups = _groups_of_one_dtype(parameters, in_float32, mp_policy)
    check_dtypes([group[0].dtype for group, _ in groups])
    rows, scalars = _give_rows(modules, parameters, ranks)
    (_, policy), *others = [([rows.get(p, p) for p in group], policy) for group, policy in groups] or [([], mp_policy)]
    ignored = {p for group, _ in others for p in group} | set(replicated)
    choose_dim = DimToCut(ranks)
    origins = [type(module).__module__ for module in modules]
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    options |= {"reshard_after_forward": reshard, "offload_policy": offload}
    if fully_shard_fn is None:
        fully_shard(modules, **options, ignored_params=ignored, shard_placement_fn=choose_dim)
    else:
        known = {**options, "ignored_params": ignored} if ignored else options
        fully_shard_fn(modules if len(modules) > 1 else modules[0], **known)
    # transformers takes FSDP2's subclass, which lies in torch, for code from the hub, and then initializes differently.
    for module, origin in zip(modules, origins, strict=True):
        type(module).__module__ = origin
        record_as_before(module)
        watch_hidden_outputs(module)
        keep_given_containers(module, watch_outputs)
        if fully_shard_fn is None:
            refuse_written_weights(module)
        if len(modules) > 1:
            module.register_forward_hook(_gather_for_backward)
    for group, other_policy in others:
        add_parameter_group(modules[0], group, other_policy, choose_dim)
    if scalars:
        keep_scalars_whole(modules[0], scalars)
    if isinstance(modules[0], FSDPModule):
        go_on_after_failures(modules)
        gather_trainable(modules[0])
        use_in_place(modules[0])
        reduce_what_any_rank_has(modules[0], note_reduction)


def _give_rows(
    modules: list[nn.Module], parameters: list[nn.Parameter], ranks: int
) -> tuple[dict[nn.Parameter, nn.Parameter], set[Place]]:
    """Put a row for each rank in the place of parameters without dimensions.

    Returns:
        the rows by what was there before, and their places.
    """
    rows = {p: rows_of_scalar(p, ranks) for p in parameters if p.ndim == 0}
    parts = {part for module in modules for part in module.modules()} if rows else ()
    places = {(part, name) for part in parts for name, p in own_parameters(part).items() if p in rows}
    for part, name in places:
        scalar = own_parameters(part)[name]
        assert scalar is not None
        own_parameters(part)[name] = rows[scalar]
    return rows, places


def _groups_of_one_dtype(
    parameters: list[nn.Parameter], in_float32: set[nn.Parameter], mp_policy: MixedPrecisionPolicy
) -> list[tuple[list[nn.Parameter], MixedPrecisionPolicy]]:
    """Group parameters that are stored and compute in one dtype, with their policies, the largest group first."""
    groups: dict[tuple[torch.dtype, bool], list[nn.Parameter]] = {}
    for parameter in parameters:
        is_cast = mp_policy.param_dtype not in (None, parameter.dtype)
        groups.setdefault((parameter.dtype, is_cast and parameter in in_float32), []).append(parameter)
    ordered = sorted(groups.items(), key=lambda item: -sum(p.numel() for p in item[1]))
    return [(group, _policy_of(dtype, keep, mp_policy)) for (dtype, keep), group in ordered]


def _policy_of(dtype: torch.dtype, keep: bool, mp_policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """Choose the policy of parameters of ``dtype``: in float32 gradients of complex ones would lose a part."""
    if not dtype.is_floating_point or dtype == torch.float64:
        return replace(mp_policy, param_dtype=None, reduce_dtype=None)
    return replace(mp_policy, param_dtype=None) if keep else mp_policy


def _gather_for_backward(module: nn.Module, args: tuple, output: Any) -> None:
    """Gathers a unit for the backward pass where its last module's output may be unused, which FSDP2 relies on: the
    features of a tower are often those of an earlier block.
    """
    assert isinstance(module, FSDPModule)
    for value in tree_leaves(output):
        if isinstance(value, Tensor) and value.requires_grad:
            value.register_hook(lambda _: module.unshard())
