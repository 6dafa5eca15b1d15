"""During the forward pass of a block its modules see this rank's local tensors in the place of DTensor parameters.

They are put there by hooks around the block, and around the model for what lies outside of blocks; a recomputation in
the backward pass puts them there again.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement

from lightning_automodel._compat.dtensor import is_shared
from lightning_automodel.blocks import find_blocks, find_large_ends, outermost
from lightning_automodel.calls import Context, keep_for_recomputation
from lightning_automodel.collectives import copy_in
from lightning_automodel.plans import Layout, ParameterLayout
from lightning_automodel.sequence_parallel import Stream

_LOCAL_TENSORS = "_local_tensors_of_tensor_parallel"


@dataclass
class _LocalTensor:
    """One parameter that a unit swaps: where it hangs, and how its local tensor is made."""

    module: nn.Module
    name: str
    gradient: Placement
    zero: bool
    rows: tuple[int, int] | None
    stream: Stream | None
    """the gradient is a partial sum only while this stream is cut"""
    sum_over: ProcessGroup | None
    """where partial gradients are summed as they come; ``None``: FSDP2 copies all gradients, and sums partial ones"""


def install_local_tensors(
    model: nn.Module,
    tp_mesh: DeviceMesh,
    layout: Layout,
    streams: dict[str, Stream] | None = None,
    *,
    is_final: bool = False,
) -> None:
    """During the forward pass of a block, and of the model for the rest, modules see local tensors as parameters.

    Per unit and not per module, because some parents read a child's weight without calling it.

    Args:
        model: whose parameters are DTensors over ``tp_mesh``.
        tp_mesh: the tensor-parallel axis.
        layout: how they lie on it.
        streams: of the blocks whose stream is cut on the sequence.
        is_final: no other stage reduces gradients, so partial ones are summed over ``tp_mesh`` here.
    """
    first, last = find_large_ends(model)
    own = [*find_blocks(model), *first, *last]
    units: dict[str, list[_LocalTensor]] = {name: [] for name in ("", *own)}
    for module_name, module in model.named_modules():
        unit = outermost(own, module_name) or ""
        for name in module._parameters:
            parameter_layout = layout.parameters.get(f"{module_name}.{name}" if module_name else name)
            if parameter_layout is not None:
                stream = (streams or {}).get(unit) if parameter_layout.sliced else None
                units[unit].append(_local_tensor(module, name, parameter_layout, tp_mesh, stream, is_final))
    for name, tensors in units.items():
        unit_module = model.get_submodule(name)
        setattr(unit_module, _LOCAL_TENSORS, tensors)
        unit_module.register_forward_pre_hook(_enter_unit)
        unit_module.register_forward_hook(_leave_unit, always_call=True)
        keep_for_recomputation(unit_module, _local_again)


def _local_tensor(
    module: nn.Module, name: str, layout: ParameterLayout, tp_mesh: DeviceMesh, stream: Stream | None, is_final: bool
) -> _LocalTensor:
    rank, rows = tp_mesh.get_local_rank(), None
    sum_over = tp_mesh.get_group() if is_final else None
    if layout.shared_heads:
        per_head = module.get_parameter(name).shape[0] // layout.shared_heads
        rows = (rank * layout.shared_heads // tp_mesh.size() * per_head, per_head)
    return _LocalTensor(module, name, layout.gradient, layout.on_first_rank and rank != 0, rows, stream, sum_over)


def _enter_unit(unit: nn.Module, args: tuple) -> None:
    if getattr(unit, "gradient_checkpointing", False) and unit.training and torch.is_grad_enabled():
        raise ValueError(
            f"transformers' own activation checkpointing was turned on for a {type(unit).__name__} after the model was "
            "made parallel, and would recompute without the rank's slices; use activation_checkpointing=True of the "
            "strategy's config, or call gradient_checkpointing_enable() in configure_model, where it does the same"
        )
    unit.__dict__.setdefault("_swapped", []).append(_swap_in(unit))


def _leave_unit(unit: nn.Module, args: tuple, output: Any) -> None:
    if swapped := unit.__dict__.get("_swapped"):  # nothing, if a hook before raised
        _swap_out(swapped.pop())


def _local_again(unit: nn.Module) -> Context:
    @contextmanager
    def local_again() -> Generator[None, None, None]:
        swapped = _swap_in(unit)
        try:
            yield
        finally:
            _swap_out(swapped)

    return local_again


_Swapped = list[tuple[nn.Module, str, DTensor]]


def _swap_in(unit: nn.Module) -> _Swapped:
    local: dict[Tensor, Tensor] = {}
    swapped: _Swapped = []
    for entry in getattr(unit, _LOCAL_TENSORS):
        parameter = entry.module._parameters[entry.name]
        if not isinstance(parameter, DTensor):
            continue  # local tensors are in place already
        if parameter not in local:
            local[parameter] = _to_local(parameter, entry)
        entry.module._parameters[entry.name] = local[parameter]
        swapped.append((entry.module, entry.name, parameter))
    return swapped


def _swap_out(swapped: _Swapped) -> None:
    for module, name, parameter in swapped:
        module._parameters[name] = parameter  # type: ignore[assignment]


def _to_local(parameter: DTensor, entry: _LocalTensor) -> Tensor:
    partial = entry.stream is not None and entry.stream.length is not None
    gradient = Partial() if partial else entry.gradient
    if entry.sum_over is not None and gradient.is_partial():
        local = copy_in(parameter.to_local(grad_placements=[Replicate()]), entry.sum_over)
    else:
        local = parameter.to_local(grad_placements=[gradient])
        if entry.sum_over is not None and local.requires_grad:
            local = _OwnGradient.apply(local)
    if entry.rows is not None:
        return local.narrow(0, *entry.rows)
    # The bias of a sum over tp counts once. Every rank keeps it in the graph, so that all take part in the reduction.
    return local * 0 if entry.zero else local


class _OwnGradient(torch.autograd.Function):
    """What arrives becomes ``parameter.grad``, which is added to and scaled in place.

    For its own leaves autograd copies a gradient that others hold (both terms of a sum have the same one), or that lies
    differently in memory. Of a DTensor it sees the wrapper only, which is always new.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clone(memory_format=torch.contiguous_format) if is_shared(grad) else grad.contiguous()
