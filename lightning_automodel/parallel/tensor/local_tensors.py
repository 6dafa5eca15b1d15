"""Shows the modules of a block this rank's local tensors in the place of DTensor parameters during its forward pass.

They are put there by hooks around the block, and around the model for what lies outside of blocks; a recomputation in
the backward pass puts them there again.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_automodel._compat.dtensor.gradients import gradient_from, gradient_spec, local_of, own
from lightning_automodel._compat.torch.modules import own_parameters
from lightning_automodel._compat.torch.tensors import version_of
from lightning_automodel.distributed.collectives import copy_in, scale_gradient, summed
from lightning_automodel.modules.parameter_swap import ParameterSwap
from lightning_automodel.modules.structure import find_blocks, find_large_ends, outermost
from lightning_automodel.modules.wrappers import is_wrapper, name_without_wrappers
from lightning_automodel.parallel.activation_checkpointing.blocks import has_switch
from lightning_automodel.parallel.tensor.origins import (
    message_of_slice,
    messages_of_parameters,
    note_entered,
    note_part,
)
from lightning_automodel.parallel.tensor.replicated_gradients import noting
from lightning_automodel.parallel.tensor.stream import Stream
from lightning_automodel.plans import Layout, ParameterLayout
from lightning_automodel.plans.layout import Rows


@dataclass(frozen=True)
class _LocalTensor:
    """How the local tensor of one parameter is made."""

    gradient: Placement
    zero: bool
    rows: Rows
    stream: Stream | None
    """the gradient is a partial sum only while this stream is cut"""
    sum_over: ProcessGroup | None
    """where partial gradients are summed as they come; ``None``: FSDP2 sums them"""
    note: Callable[[Tensor], None] | None = None
    """looks at the gradient of this rank, as long as anybody wants to know"""
    is_told: bool = False
    """layers ask of what enters them whether its gradient is a rank's own"""
    message: str | None = None
    """of the error where a loss reads what comes of it; ``None``: a loss may"""
    why_sliced: str | None = None
    """of that where it reads what comes of it while the stream is cut"""

    def __call__(self, parameter: DTensor) -> Tensor:
        partial = self.stream is not None and self.stream.length is not None
        gradient = Partial() if partial else self.gradient
        local = _local(parameter, gradient, self.sum_over)
        is_own = self.is_told and not self.gradient.is_replicate()
        if is_own and local.grad_fn is not None and not torch.compiler.is_compiling():
            note_part(local.grad_fn, self.message)
        elif partial:
            note_entered(local, self.why_sliced)
        if self.note is not None and local.requires_grad and not torch.compiler.is_compiling():
            local.register_hook(self.note)
        if self.rows:
            return take_rows(local, self.rows)
        # The bias of a sum over tp counts once. Every rank keeps it in the graph, so that all take part in the
        # reduction.
        return local * 0 if self.zero else local


def install_local_tensors(
    model: nn.Module,
    tp_mesh: DeviceMesh,
    layout: Layout,
    streams: dict[str, Stream] | None = None,
    *,
    is_final: bool = False,
    gathered_alone: Iterable[str] = (),
) -> None:
    """Shows modules local tensors as parameters during the forward pass of a block, and of the model for the rest.

    Per block and not per module, because some parents read a child's weight without calling it.

    Args:
        model: whose parameters are DTensors over ``tp_mesh``.
        tp_mesh: the tensor-parallel axis.
        layout: how they lie on it.
        streams: of the blocks whose stream is cut on the sequence.
        is_final: no other stage reduces gradients, so partial ones are summed over ``tp_mesh`` here.
        gathered_alone: modules inside of blocks that show their own parameters themselves.
    """
    _follow_steps()
    first, last = find_large_ends(model)
    own, alone = [*find_blocks(model), *first, *last], set(gathered_alone)
    # Where parameters are sharded as well, others in their place are found, or put there, by what shards.
    messages = messages_of_parameters(model, layout, tp_mesh.size())
    of_slices = {name: message_of_slice(name, model.get_submodule(name), tp_mesh.size()) for name in streams or {}}
    swaps = {name: ParameterSwap(stored=DTensor, refuses_others=is_final) for name in ("", *own, *alone)}
    for module_name, module in _in_each_block(model, own):
        of_layer = name_without_wrappers(module_name)
        is_alone = of_layer in alone and not is_wrapper(module)
        owner_name = of_layer if is_alone else outermost(own, module_name) or ""
        for name in own_parameters(module):
            full = f"{module_name}.{name}".removeprefix(".")
            if (parameter_layout := layout.parameters.get(full)) is not None:
                block = outermost(own, module_name) or ""
                stream = (streams or {}).get(block) if parameter_layout.sliced else None
                size = next(iter(module.get_parameter(name).shape), 0)
                local = _local_tensor(parameter_layout, size, tp_mesh, stream, is_final)
                is_told = layout.is_tried or full in messages
                local = replace(local, is_told=is_told, message=messages.get(full), why_sliced=of_slices.get(block))
                if not layout.measured and full in layout.claimed:
                    local = replace(local, note=noting(model, full))
                swaps[owner_name].add(module, name, local)
    for name, swap in swaps.items():
        owner = model.get_submodule(name)
        owner.register_forward_pre_hook(_refuse_recomputing)
        swap.install(owner, behind_others=name in (streams or {}))


def _in_each_block(model: nn.Module, own: list[str]) -> Iterator[tuple[str, nn.Module]]:
    """List the modules of ``model``, and once more those that stand in another one of the modules ``own``, too.

    A block that stands in several places has one name.
    """
    names = {id(model.get_submodule(name)): name for name in own}
    places = {name: names.get(id(module)) for name, module in model.named_modules(remove_duplicate=False)}
    copies = [name for name, first in places.items() if first not in (None, name)]
    seen: set[tuple[int, str | None]] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        place = (id(module), outermost(own, name))
        if place not in seen and outermost(copies, name) is None:
            seen.add(place)
            yield name, module


def _local_tensor(
    layout: ParameterLayout, size: int, tp_mesh: DeviceMesh, stream: Stream | None, is_final: bool
) -> _LocalTensor:
    zero = layout.on_first_rank and tp_mesh.get_local_rank() != 0
    sum_over = tp_mesh.get_group() if is_final else None
    return _LocalTensor(layout.gradient, zero, rows_of_rank(layout, size, tp_mesh), stream, sum_over)


def rows_of_rank(layout: ParameterLayout, size: int, tp_mesh: DeviceMesh) -> Rows:
    """Find the rows (first, how many) of a whole parameter of ``size`` rows with which this rank computes.

    Returns:
        nothing where that is all of them.
    """
    return layout.rows(size, tp_mesh.size(), tp_mesh.get_local_rank())


def take_rows(whole: Tensor, rows: Rows) -> Tensor:
    """Take the rows of ``whole`` that a rank uses, one part below the other."""
    parts = [whole.narrow(0, start, length) for start, length in rows]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _refuse_recomputing(owner: nn.Module, args: tuple) -> None:
    if getattr(owner, "gradient_checkpointing", False) and owner.training and torch.is_grad_enabled():
        _check_switch(owner)


def _check_switch(owner: nn.Module) -> None:
    """Refuse activation checkpointing that another flag than ours turned on: it would recompute with DTensors."""
    if not any(has_switch(module) for module in owner.modules()):
        raise ValueError(
            f"activation checkpointing of its own was turned on for a {type(owner).__name__}, and would recompute "
            "without the rank's slices; use activation_checkpointing=True of the strategy's config"
        )


def _local(parameter: DTensor, gradient: Placement, sum_over: ProcessGroup | None) -> Tensor:
    """Give ``parameter.to_local(grad_placements=[gradient])``, with a gradient that may be added to in place.

    With ``sum_over`` it is final.
    """
    if not (parameter.requires_grad and torch.is_grad_enabled()):
        return parameter.to_local()
    if not torch.compiler.is_compiling():
        return _Local.apply(parameter, gradient, sum_over)
    # In a graph that dynamo makes of a whole model, it does not know how a DTensor is made.
    if sum_over is not None and gradient.is_partial():
        return copy_in(parameter.to_local(grad_placements=[Replicate()]), sum_over)
    # A product is nobody else's; compilers take copies out of their graphs.
    return scale_gradient(parameter.to_local(grad_placements=[gradient]), 1.0)


class _Local(torch.autograd.Function):
    """A DTensor's local tensor, whose gradient becomes a DTensor: the ``grad`` of the parameter, or of FSDP2's copy.

    It is nobody else's, and lies in memory as rows do, which autograd sees to for its own leaves only. The local tensor
    is no view: code of users writes into whole parameters under ``no_grad``, which autograd forbids for views that a
    function gave. It counts writes into its memory with that of the DTensor.
    """

    @staticmethod
    def forward(ctx: Any, parameter: DTensor, gradient: Placement, sum_over: ProcessGroup | None) -> Tensor:
        local = local_of(parameter)
        is_summed = sum_over is not None and gradient.is_partial()
        ctx.spec, ctx.strides = gradient_spec(parameter, Replicate() if is_summed else gradient), local.stride()
        ctx.is_summed, ctx.sum_over = is_summed, sum_over
        ctx.parameter, ctx.written, ctx.told = parameter, version_of(parameter), version_of(local)
        return local.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[DTensor, None, None]:
        if version_of(ctx.parameter) != ctx.written and version_of(local_of(ctx.parameter)) == ctx.told:
            raise RuntimeError(_changed(ctx.parameter))  # what autograd was told of, it has seen where it was needed
        grad = summed(grad, ctx.sum_over) if ctx.is_summed else own(grad).contiguous()
        return gradient_from(grad, ctx.spec, ctx.strides), None, None


@cache
def _follow_steps() -> None:
    """Have autograd told of the steps of all optimizers, from now on."""
    register_optimizer_step_post_hook(_tell_of_step)


def _tell_of_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Let autograd see that ``optimizer`` has written into local tensors, which count no writes into their DTensors."""
    stepped = (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    increment_version([local_of(p) for p in stepped if isinstance(p, DTensor)])


def _changed(parameter: DTensor) -> str:
    return (
        f"a parameter {list(parameter.shape)} that is needed for gradient computation has been modified by an inplace "
        "operation since the forward pass, such as the step of an optimizer: gradients would be of other weights. "
        "Call backward() before step(), or compute the loss again behind it"
    )
