"""Tensor parallelism without DTensors, which Megatron-FSDP cannot shard by rows: parameters are plain slices.

What DTensor does for FSDP2 is done by hand: a whole parameter that works on a slice gets its gradient summed over tp
in the backward pass, and some are used in part, or on one rank only.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from lightning_automodel.blocks import find_blocks, outermost
from lightning_automodel.calls import Context, keep_for_recomputation
from lightning_automodel.plans import Layout, ParameterLayout

_USES = "_parameters_used_in_part"
_SWAPPED = "_swapped_by_megatron"
_SLICE = "_slice_of_tensor_parallel"
_Swapped = list[tuple[nn.Module, str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Slice:
    """What a rank's plain parameter is of the whole one.

    Attributes:
        shape: of the whole parameter.
        placement: on the tp axis.
        is_partial: the gradient that the backward pass gives is a part of a sum over tp.
    """

    shape: torch.Size
    placement: Placement
    is_partial: bool


def slice_of(parameter: Tensor) -> Slice | None:
    """What ``parameter`` is a slice of; ``None`` if it is whole on every rank."""
    return getattr(parameter, _SLICE, None)


def make_plain(model: nn.Module, layout: Layout, tp_mesh: DeviceMesh) -> None:
    """Replaces DTensors by this rank's slices, in place, after ``apply_tensor_parallel``; ties stay."""
    replaced: dict[Tensor, nn.Parameter] = {}
    blocks = list(find_blocks(model))
    uses: dict[str, list[_Use]] = {}
    for module_name, module in model.named_modules():
        for name, parameter in list(module._parameters.items()):
            if not isinstance(parameter, DTensor):
                continue
            found = layout.parameters[f"{module_name}.{name}" if module_name else name]
            if parameter not in replaced:
                replaced[parameter] = _plain(parameter, found)
            module._parameters[name] = replaced[parameter]
            if use := _use(module, name, found, parameter.shape[0], tp_mesh):
                uses.setdefault(outermost(blocks, module_name) or "", []).append(use)
    for unit_name, found_uses in uses.items():
        unit = model.get_submodule(unit_name)
        setattr(unit, _USES, found_uses)
        unit.register_forward_pre_hook(_enter)
        unit.register_forward_hook(_leave, always_call=True)
        keep_for_recomputation(unit, _used_again)


def _plain(parameter: DTensor, layout: ParameterLayout) -> nn.Parameter:
    with torch.no_grad():
        new = nn.Parameter(parameter.to_local().clone(), requires_grad=parameter.requires_grad)
    is_partial = layout.gradient.is_partial()
    setattr(new, _SLICE, Slice(shape=parameter.shape, placement=layout.placement, is_partial=is_partial))
    return new


def sum_over_tp(parameter: Tensor, group: ProcessGroup) -> None:
    """Sums each gradient of ``parameter``, a leaf, over ``group`` before it is accumulated."""

    def summed(gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=group)
        return gradient

    parameter.register_hook(summed)


# ---- parameters that are used in part --------------------------------------------------------------------------------


@dataclass
class _Use:
    module: nn.Module
    name: str
    zero: bool
    rows: tuple[int, int] | None

    def of(self, parameter: Tensor) -> Tensor:
        """A tensor with memory of its own, because the parameter's is freed before the backward pass."""
        if self.rows is not None:
            return parameter.narrow(0, *self.rows).clone()
        return parameter * 0  # every rank keeps it in the graph, so that all take part in the reduction


def _use(module: nn.Module, name: str, layout: ParameterLayout, size: int, mesh: DeviceMesh) -> _Use | None:
    rank, rows = mesh.get_local_rank(), None
    if layout.shared_heads:
        per_head = size // layout.shared_heads
        rows = (rank * layout.shared_heads // mesh.size() * per_head, per_head)
    zero = layout.on_first_rank and rank != 0
    return _Use(module, name, zero, rows) if zero or rows else None


def _enter(unit: nn.Module, args: tuple) -> None:
    unit.__dict__.setdefault(_SWAPPED, []).append(_swap_in(unit))


def _leave(unit: nn.Module, args: tuple, output: Any) -> None:
    if swapped := unit.__dict__.get(_SWAPPED):
        _swap_out(swapped.pop())


def _used_again(unit: nn.Module) -> Context:
    @contextmanager
    def used_again() -> Generator[None, None, None]:
        swapped = _swap_in(unit)
        try:
            yield
        finally:
            _swap_out(swapped)

    return used_again


def _swap_in(unit: nn.Module) -> _Swapped:
    swapped: _Swapped = []
    for use in getattr(unit, _USES):
        parameter = use.module._parameters[use.name]
        if isinstance(parameter, nn.Parameter):
            use.module._parameters[use.name] = use.of(parameter)
            swapped.append((use.module, use.name, parameter))
    return swapped


def _swap_out(swapped: _Swapped) -> None:
    for module, name, parameter in swapped:
        module._parameters[name] = parameter  # type: ignore[assignment]
