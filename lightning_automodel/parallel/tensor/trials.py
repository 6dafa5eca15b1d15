"""Tries a module of a user once: what slices give, summed over the ranks, is what the whole gives, or an error.

::

                       GPU 0                          GPU 1
    drawn weights      up 0-7, down 0-7               up 0-7, down 0-7         the same on all ranks
    on slices          f(up 0-3, down 0-3)            f(up 4-7, down 4-7)      one all-reduce
    whole              f(up 0-7, down 0-7)            the same                 as one process computes

The weights are drawn, because those of a new module may hide what it does (a gate of zeros, a mixture of heads that
begins as the identity), and computed with in float32, because a few of many features make a small difference. The
module runs on what enters it in the first forward pass, as in evaluation and as in training but for dropout; what it
writes into buffers, and gradients of what enters, are compared, too. What draws at random otherwise cannot be tried.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.hooks import RemovableHandle

from lightning_automodel._compat.fake.shapes import is_fake
from lightning_automodel._compat.torch.pytree import tree_map
from lightning_automodel._compat.torch.tensors import TorchDispatchMode, version_of, without_modes
from lightning_automodel.distributed.random_numbers import places_of_generators
from lightning_automodel.modules.caches import caches_by_name, without_cache
from lightning_automodel.parallel.given_containers import changed, copied
from lightning_automodel.parallel.tensor.beside import beside, note_beside
from lightning_automodel.parallel.tensor.parts import Beside, cut_dim, whole_of
from lightning_automodel.parallel.tensor.trial_weights import (
    Tried,
    draw_weights,
    in_place,
    is_whole_now,
    restored,
    slice_of_rank,
    without_collectives,
)
from lightning_automodel.parallel.tensor.twins import is_draw
from lightning_automodel.parallel.traces import (
    NARROW,
    WithoutDropout,
    floating,
    fresh,
    in_float32,
    leaving_no_trace,
    left_behind,
    refuse_gradients,
)
from lightning_automodel.plans.linearity import tensors
from lightning_automodel.plans.selection import layers_of, wildcard

_TOLERANCE, _OF_NARROW = 2e-3, 3e-2
_tried: list[nn.Module] = []


def is_tried_now(module: nn.Module) -> bool:
    """Tell whether ``module`` runs for its trial, which itself sums its gradients."""
    return bool(_tried) and module is _tried[-1]


class Trial:
    """Tries one module over ``tp_mesh``."""

    def __init__(self, tried: Tried, tp_mesh: DeviceMesh) -> None:
        self.name, self._tried, self._tp_mesh = tried.name, tried, tp_mesh

    def install(self, module: nn.Module, untried: set[str]) -> RemovableHandle:
        """Install the hook that tries ``module`` behind its next pass, and takes its name out of ``untried``."""

        def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
            if self.name in untried and not is_whole_now():
                untried.discard(self.name)
                if self._tried.is_boundary and (left := left_behind(module)):
                    self._keep_from_losses(module, left)
                found: list[Beside] = []
                if not _is_right(module, self._tried, self._tp_mesh, args, kwargs, found):
                    untried.add(self.name)
                    raise ValueError(self._message(module))
                note_beside(module, found)

        return module.register_forward_hook(hook, prepend=True, with_kwargs=True)

    def _message(self, module: nn.Module) -> str:
        return (
            f"{self.name} ({type(module).__name__}) gives other numbers with parts of its weights on the tp ranks than "
            "with the whole: something in it computes across the features or heads of which each rank has a part, or "
            "with their number or place, or changes a sum over the ranks. Leave the module whole, with a rule "
            f"'replicate' for each of its layers ({layers_of(self.name, module)}) in "
            "FSDP2Config(tp_plan={'extends': 'model', ...}), or use tp=1"
        )

    def _keep_from_losses(self, module: nn.Module, left: list[tuple[nn.Module, str, str]]) -> None:
        """Let a gradient of what ``module`` keeps in its attributes be an error, now and in later passes."""

        def refuse(*_: Any) -> None:
            for owner, name, path in left:
                if name in vars(owner):
                    refuse_gradients(owner, name, self._message_of_attribute(module, path))

        refuse()
        module.register_forward_hook(refuse)

    def _message_of_attribute(self, module: nn.Module, path: str) -> str:
        return (
            f"a loss reads what {self.name} ({type(module).__name__}) keeps in its attribute {path}: every one of the "
            f"{self._tp_mesh.size()} tp ranks computes it, and their gradients would be summed. Add the rule "
            f"{wildcard(self.name)!r}: 'separate' to FSDP2Config(tp_plan={{'extends': 'model', ...}}): each of its "
            "members then takes its own collectives; or keep value.detach()"
        )


def _is_right(
    module: nn.Module, tried: Tried, tp_mesh: DeviceMesh, args: tuple, kwargs: dict[str, Any], found: list[Beside]
) -> bool:
    """Compare what the ranks' slices give together with what the whole gives: values, and gradients of what enters.

    ``found`` gets for each value beside the first output what a rank has of it.

    Returns:
        true also where that cannot be told: it draws at random, or does not run with other weights.
    """
    first = floating((args, kwargs))[:1]
    if not first or not first[0].numel() or is_fake(first[0]):
        return True
    device_type = first[0].device.type
    with without_modes(), torch.no_grad(), torch.autocast(device_type, enabled=False), leaving_no_trace(module):
        args, kwargs = caches_by_name(module, args, kwargs)
        entered = args, without_cache(kwargs)
        whole = changed(entered, lambda x, _: whole_of(x, tp_mesh.get_group()))
        # What entered the real pass comes from other layers, which a trial must not tell where it goes.
        parts = changed(entered, lambda x, _: x.detach())
        given = _Given(in_float32(whole), in_float32(parts), first[0].device)
        _tried.append(module)
        try:
            runs = [partial(run, module) for run in (_evaluate, _differentiate, _train)]
            return all([_compare(module, tried, tp_mesh, given, run, found) for run in runs])
        finally:
            _tried.pop()


@dataclass(frozen=True)
class _Given:
    """What a module is called with, as it is and as a rank has it: arguments by place and by name."""

    whole: tuple[tuple, dict[str, Any]]
    parts: tuple[tuple, dict[str, Any]]
    device: torch.device


def _compare(
    module: nn.Module, tried: Tried, tp_mesh: DeviceMesh, given: _Given, run: Callable, noted: list[Beside]
) -> bool:
    whole, watch = draw_weights(tried, given.device), _Watch(tp_mesh)
    slices = {key: slice_of_rank(whole[key], layout, tp_mesh) for key, (_, _, layout) in tried.parameters.items()}
    with in_place(module, whole), restored(module, tried.attributes), without_collectives():
        expected = _numbers_of(partial(run, *given.whole, watch), watch)
    beside_whole, watch.beside = watch.beside, []
    with in_place(module, slices):
        found = _numbers_of(partial(run, *given.parts, watch), watch)
    if len(expected) == len(found):
        expected = [watch.part_like(x, y) for x, y in zip(expected, found, strict=True)]
    can_tell = len(expected) == len(found) > 0 and not watch.draws
    can_tell = can_tell and all(one.shape == other.shape for one, other in zip(expected, found, strict=True))
    agreed = torch.tensor(float(can_tell), device=given.device)
    dist.all_reduce(agreed, dist.ReduceOp.MIN, tp_mesh.get_group())
    if not agreed.item():
        return True
    noted[:] = _what_ranks_have(watch.beside, beside_whole, tp_mesh) or noted
    if tried.is_boundary:
        dist.all_reduce(found[0], group=tp_mesh.get_group())
    errors = [(x - y).norm() / y.norm() for x, y in zip(found, expected, strict=True)]
    bound = _OF_NARROW if watch.is_narrow else _TOLERANCE
    wrong = torch.tensor(float(any(error > bound for error in errors)), device=given.device)  # NaN tells nothing
    dist.all_reduce(wrong, dist.ReduceOp.MAX, tp_mesh.get_group())
    return not wrong.item()


def _what_ranks_have(found: list[Tensor], expected: list[Tensor], tp_mesh: DeviceMesh) -> list[Beside]:
    """Tell for each value beside the first output whether every rank gets what the whole gives, or which part."""
    if not expected or len(found) != len(expected):
        return []
    pairs = list(zip(found, expected, strict=True))
    alike = [x.shape == y.shape and bool((x - y).norm() <= _TOLERANCE * y.norm()) for x, y in pairs]
    agreed = torch.tensor(alike, dtype=torch.float32, device=found[0].device)
    dist.all_reduce(agreed, dist.ReduceOp.MIN, tp_mesh.get_group())
    dims = [cut_dim(x.shape, y.shape, tp_mesh.size()) for x, y in pairs]
    return [Beside(bool(x), dim) for x, dim in zip(agreed.tolist(), dims, strict=True)]


def _numbers_of(run: Callable[[], list[Tensor]], watch: "_Watch") -> list[Tensor]:
    """Return what ``run`` gives, or nothing where it cannot be computed with such weights."""
    places, of_python = places_of_generators(), random.getstate()
    try:
        return run()
    except Exception:  # a kernel for narrow numbers alone, a check of values
        return []
    finally:
        watch.draws |= of_python != random.getstate() or places != places_of_generators()
        random.setstate(of_python)


def _evaluate(
    module: nn.Module, args: tuple, kwargs: dict[str, Any], watch: "_Watch", training: bool = False
) -> list[Tensor]:
    """Return the first output of ``module``, and the buffers that it wrote."""
    with fresh(module, training) as buffers:
        before = {name: (version_of(buffer), buffer) for name, buffer in buffers.items()}
        with watch, WithoutDropout():
            output = module.forward(*copied(args), **copied(kwargs))
        watch.beside = beside(output)
        written = [x.float() for v, x in before.values() if x.is_floating_point() and version_of(x) != v]
    return [x.float().clone() for x in floating(output)[:1]] + written


_train = partial(_evaluate, training=True)


def _differentiate(module: nn.Module, args: tuple, kwargs: dict[str, Any], watch: "_Watch") -> list[Tensor]:
    """Return the gradient of what enters ``module``: code of users may change gradients on their way."""
    first = floating((args, kwargs))[0]
    # Hooks around it, of a recomputation, are to see nothing of what is saved.
    saved = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    with fresh(module, training=True), torch.enable_grad(), saved, WithoutDropout():
        entering = first.detach().clone().requires_grad_()
        held = entering.clone()  # which may be written to
        args, kwargs = tree_map(lambda x: held if x is first else x, (args, kwargs))
        with watch:
            output = floating(module.forward(*copied(args), **copied(kwargs)))[0]
        return [torch.autograd.grad(output, entering, watch.gradient_of(output))[0].float()]


class _Watch(TorchDispatchMode):
    """Notes whether something is drawn, and whether numbers are narrow. The whole runs before the slices."""

    def __init__(self, tp_mesh: DeviceMesh) -> None:
        super().__init__()
        self._tp_mesh, self._drawn = tp_mesh, torch.empty(0)
        self.draws = self.is_narrow = False
        self.beside: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        self.draws |= is_draw(func, args, kwargs or {})
        self.is_narrow |= any(x.dtype in NARROW for x in tensors(output))
        return output

    def part_like(self, whole: Tensor, part: Tensor) -> Tensor:
        """Return this rank's features of ``whole`` if ``part`` has so many, as heads without their last matrix."""
        parts = whole.chunk(self._tp_mesh.size(), -1) if whole.ndim else ()
        own = next(iter(parts[self._tp_mesh.get_local_rank() :]), whole)
        return own if own.shape == part.shape else whole

    def gradient_of(self, output: Tensor) -> Tensor:
        """Draw a gradient for ``output``: for a rank's features its part of that for all of them."""
        drawn = self.part_like(self._drawn, output)
        if drawn.shape != output.shape:
            drawn = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
            self._drawn = drawn
        return drawn.to(output)
