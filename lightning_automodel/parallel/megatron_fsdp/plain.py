"""Tensor parallelism without DTensors, which Megatron-FSDP cannot shard by rows: parameters are plain slices.

What DTensor does for FSDP2 is done by hand: a whole parameter that works on a slice gets its gradient summed over tp
in the backward pass, and some are used in part, or on one rank only.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from lightning_automodel._compat.torch.modules import own_parameters
from lightning_automodel.modules.parameter_swap import ParameterSwap
from lightning_automodel.modules.structure import find_blocks, outermost
from lightning_automodel.parallel.tensor.local_tensors import rows_of_rank, take_rows
from lightning_automodel.parallel.tensor.origins import messages_of_parameters, note_part
from lightning_automodel.plans import Layout, ParameterLayout
from lightning_automodel.plans.layout import Rows

_SLICE = "_slice_of_tensor_parallel"


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
    """Returns what ``parameter`` is a slice of; ``None`` if it is whole on every rank."""
    return getattr(parameter, _SLICE, None)


def make_plain(model: nn.Module, layout: Layout, tp_mesh: DeviceMesh) -> None:
    """Replaces DTensors by this rank's slices, in place, after ``apply_tensor_parallel``; ties stay."""
    replaced: dict[Tensor, nn.Parameter] = {}
    blocks, messages = list(find_blocks(model)), messages_of_parameters(model, layout, tp_mesh.size())
    swaps: dict[str, ParameterSwap] = {}
    for module_name, module in model.named_modules():
        for name, parameter in list(own_parameters(module).items()):
            if not isinstance(parameter, DTensor):
                continue
            full = f"{module_name}.{name}".removeprefix(".")
            found = layout.parameters[full]
            if parameter not in replaced:
                replaced[parameter] = _plain(parameter, found)
                if not found.gradient.is_replicate():
                    note_part(replaced[parameter], messages.get(full))
            own_parameters(module)[name] = replaced[parameter]
            if part := _part(found, parameter.shape[0], tp_mesh):
                swaps.setdefault(outermost(blocks, module_name) or "", ParameterSwap()).add(module, name, part)
    for owner_name, swap in swaps.items():
        swap.install(model.get_submodule(owner_name))


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


@dataclass(frozen=True)
class _Part:
    factor: float
    rows: Rows

    def __call__(self, parameter: Tensor) -> Tensor:
        """Returns a tensor with memory of its own, because the parameter's is freed before the backward pass."""
        if self.rows:
            return take_rows(parameter, self.rows).clone()
        return parameter * self.factor  # on every rank, so that all reduce their gradients in the same order


def _part(layout: ParameterLayout, size: int, tp_mesh: DeviceMesh) -> _Part | None:
    rows = rows_of_rank(layout, size, tp_mesh)
    factor = 0.0 if layout.on_first_rank and tp_mesh.get_local_rank() != 0 else 1.0
    return _Part(factor, rows) if layout.on_first_rank or rows else None
