"""Whole experts over tp: a plan that gives each rank some experts, where others give each rank a part of each.

All ranks of tp have the same tokens, so none travel: a rank computes those whose routes lead to its experts, and the
boundary sums as it does otherwise. Matrix products are tp times as wide, and as many as tokens come::

    8 experts, tp=2              GPU 0                       GPU 1
    moe_tp_experts               8 experts, half of each     8 experts, the other half of each
    ep_dispatch_experts          experts 0-3                 experts 4-7
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import Shard

from lightning_automodel.distributed.logs import log
from lightning_automodel.modules.forward import SharedByCopies, wrap_forward
from lightning_automodel.modules.structure import class_names
from lightning_automodel.modules.wrappers import is_wrapper
from lightning_automodel.parallel.experts.check import check_experts
from lightning_automodel.parallel.experts.dispatch import select
from lightning_automodel.parallel.experts.seam import mark_as_seam, one_expert_per_row, routed
from lightning_automodel.plans import Layout
from lightning_automodel.plans.experts import Owners, StackedExperts, stacked_experts
from lightning_automodel.plans.selection import wildcard


def find_whole_experts(model: nn.Module, layout: Layout, tp: int) -> dict[str, StackedExperts]:
    """Find and check the modules whose experts ``layout`` divides whole, before their parameters are.

    Raises:
        ValueError: if a rule is missing for one of their parameters, ``tp`` does not divide their number, they have
            adapters, or weights are not applied last.
    """
    found = {}
    for name, module in model.named_modules():
        experts = stacked_experts(name, module)
        if experts is None:
            continue
        whole = [n for n in experts.stacked if layout.parameters[f"{name}.{n}"].placement == Shard(0)]
        if not whole:
            continue
        _check(model, experts, whole, tp)
        found[name] = experts
    check_experts(model, found.values(), "use a plan that splits each expert, or leaves them whole ('replicate')")
    return found


def _check(model: nn.Module, experts: StackedExperts, whole: list[str], tp: int) -> None:
    name = wildcard(experts.name)
    if missing := [key for key in experts.stacked if key not in whole]:
        raise ValueError(
            f"the tensor-parallel plan divides the experts in {name}.{whole[0]} whole (grouped_gemm), but not those in "
            f"{name}.{missing[0]}; give all parameters of {name} this style"
        )
    if experts.number % tp:
        raise ValueError(
            f"grouped_gemm gives each rank whole experts, and tp={tp} does not divide the {experts.number} of {name}; "
            f"use a tp that divides it, or leave {name} whole, and each of its parameters ('replicate')"
        )
    if is_wrapper(model.get_submodule(experts.name.rpartition(".")[0])):
        raise ValueError(
            f"{name} has adapters on stacked experts, and grouped_gemm gives each rank whole ones: which part of an "
            f"adapter belongs to them is not known; split each expert by a plan of your own, or leave {name} whole, "
            "and each of its parameters ('replicate')"
        )


def route_to_own_experts(model: nn.Module, found: dict[str, StackedExperts], group: ProcessGroup) -> None:
    """Let the modules ``found`` compute with the experts of this rank; their parameters are divided already."""
    for name, experts in found.items():
        module, owners = model.get_submodule(name), Owners(experts.number, group.size())
        for count in experts.counts:
            setattr(module, count, owners.local)
        wrap_forward(module, _OwnRoutes(experts, owners.places(), group))
        mark_as_seam(module)
    if found:
        log(f"{class_names(model)[0]}: tp={group.size()} divides whole experts of {len(found)} modules")


class _OwnRoutes(SharedByCopies):
    def __init__(self, experts: StackedExperts, places: Tensor, group: ProcessGroup) -> None:
        self._experts, self._places, self._group = experts, places, group

    @torch.compiler.disable
    def __call__(self, module: nn.Module, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Tensor:
        hidden, index, weights = routed(module, self._experts, args, kwargs)
        self._places, ranks = self._places.to(index.device), self._group.size()
        run = one_expert_per_row(forward, self._experts, self._experts.number // ranks)
        return select(hidden, index, weights, run, self._places, self._group.rank(), ranks)
