"""Runs one optimizer step of a model that was made parallel, phase by phase, as a trainer does: real or played."""

import gc
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_automodel._compat.dtensor.tensors import StridedShard
from lightning_automodel._compat.fsdp2.units import fsdp_units
from lightning_automodel._compat.torch.modules import own_buffers
from lightning_automodel._compat.torch.pytree import tree_leaves
from lightning_automodel.gradients import clip_grad_norm_, to_local_if_dtensor
from lightning_automodel.loss.rounds import going_through
from lightning_automodel.mesh import axis, names_of_axes
from lightning_automodel.modules.structure import find_blocks
from lightning_automodel.parallel.fsdp2.running import gradients_held
from lightning_automodel.planner.watch import (
    BACKWARD,
    CLIPPING,
    FORWARD,
    GRADIENTS,
    HEAD,
    OPTIMIZER,
    PARAMETERS,
    STEP,
    Watch,
    Watched,
)
from lightning_automodel.plans.selection import wildcard


def axes_of_groups(mesh: DeviceMesh) -> dict[tuple[int, ...], str]:
    """Name the groups of this rank by their ranks: of one axis where it is one, else of several."""
    found: dict[tuple[int, ...], str] = {}
    for name in names_of_axes(mesh):
        ranks = tuple(dist.get_process_group_ranks(axis(mesh, name).get_group()))
        found.setdefault(ranks, name)
    found.setdefault(tuple(range(dist.get_world_size())), "world")
    return found


def prepare(model: nn.Module, optimizer: Optimizer) -> None:
    """Give the optimizer its states, parameters gradients, and units what they gather into, as after the first step."""
    for unit in fsdp_units(model):
        unit.unshard()
        unit.reshard()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()


def watched_step(
    model: nn.Module,
    optimizer: Optimizer,
    batch: Mapping[str, Tensor],
    mesh: DeviceMesh,
    *,
    accumulation: int = 1,
    clips: bool = True,
    defers: bool = True,
    ends: int = 2,
    abridges: bool = False,
) -> Watched:
    """Run one optimizer step and return what it did on this rank.

    Args:
        model: from :func:`~lightning_automodel.parallelize`, with the loss in what it returns.
        optimizer: of its parameters, with states and gradients of a step before.
        batch: arguments of the model; the same for every micro-batch.
        mesh: over which it was made parallel.
        accumulation: micro-batches of the step.
        clips: whether gradients are clipped by their norm.
        defers: whether gradients are reduced with the last micro-batch only.
        ends: blocks at both ends whose memory is told apart; of one, the others are a place together.
        abridges: whether few blocks of rows stand for all in the loss; only where tensors have no values.
    """
    watch = Watch(mesh.device_type, axes_of_groups(mesh))
    watch.hold(model.parameters(), PARAMETERS)
    watch.hold((b for m in model.modules() for b in own_buffers(m).values()), PARAMETERS)
    watch.hold((p.grad for p in model.parameters()), GRADIENTS)
    watch.hold(_states(optimizer), OPTIMIZER)
    hooks = _say_where(model, watch, ends)
    with _collecting_between(), watch, going_through(watch.few if abridges else iter):
        for i in range(accumulation - 1):
            with gradients_held(model, defers):
                _micro_batch(model, optimizer, batch, watch, is_first=i == 0)
        _micro_batch(model, optimizer, batch, watch, is_first=accumulation == 1)
        watch.hold((p.grad for p in model.parameters()), GRADIENTS)
        if clips:
            with watch.phase(CLIPPING):
                clip_grad_norm_(model.parameters(), 1.0)
        with watch.phase(STEP):
            optimizer.step()
    for hook in hooks:
        hook.remove()
    watch.result.parameters = _parameters(model)
    return watch.finish()


def _micro_batch(
    model: nn.Module, optimizer: Optimizer, batch: Mapping[str, Tensor], watch: Watch, is_first: bool
) -> None:
    if is_first:
        optimizer.zero_grad()  # before the forward pass, as the strategies do (strategies/steps/last_gradients.py)
    watch.enter(FORWARD)
    loss = model(**batch).loss
    gc.collect()
    watch.end_forward(model.parameters())
    with watch.phase(BACKWARD):
        loss.backward()


def _say_where(model: nn.Module, watch: Watch, ends: int) -> list[RemovableHandle]:
    """Tell the watch which block runs, forward and backward, and where the last one has ended."""
    blocks = list(find_blocks(model).values())

    def say(place: str | None) -> list[Callable[..., None]]:
        def enter(*_: Any) -> None:
            watch.at(place)

        def leave(module: nn.Module, args: tuple, output: Any) -> None:
            stream = next((x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad), None)
            if stream is not None:
                stream.register_hook(enter)

        return [enter, leave]

    handles = []
    for i, block in enumerate(blocks):
        between = "between" if ends == 1 else None  # units are gathered two ahead: two of each end have them all
        place = f"block {i}" if i < ends else f"block {i - len(blocks)}" if i >= len(blocks) - ends else between
        enter, leave = say(place)
        handles += [block.register_forward_pre_hook(enter), block.register_forward_hook(leave)]
    handles += [b.register_forward_hook(lambda *_: watch.enter(HEAD, after=FORWARD)) for b in blocks[-1:]]
    return handles


@contextmanager
def _collecting_between() -> Generator[None, None, None]:
    """Free cycles of objects between phases only, within this context: where Python does it depends on everything."""
    was_enabled, was_frozen = gc.isenabled(), gc.get_freeze_count() > 0
    gc.collect()
    gc.disable()
    if not was_frozen:
        gc.freeze()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()
        if was_enabled:
            gc.enable()


def _states(optimizer: Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


@torch.no_grad()
def _parameters(model: nn.Module) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    for name, parameter in model.named_parameters():
        local = to_local_if_dtensor(parameter)
        found[wildcard(name), _split(parameter)] += local.numel() * local.element_size()
    return found


def _split(parameter: Tensor) -> str:
    if not isinstance(parameter, DTensor):
        return "whole"
    names = parameter.device_mesh.mesh_dim_names or ()
    sizes = parameter.device_mesh.shape
    split = [
        f"{n} dim {p.dim}"
        for n, p, size in zip(names, parameter.placements, sizes, strict=True)
        if isinstance(p, Shard | StridedShard) and size > 1
    ]
    return ", ".join(split) or "whole"
