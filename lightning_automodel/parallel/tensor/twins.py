"""Finds what a block would draw on one process: its twin, whole and without memory, runs on meta and notes shapes."""

import copy
import random
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from lightning_automodel._compat.torch.modules import own_buffers, own_parameters, remove_hooks
from lightning_automodel._compat.torch.tensors import TorchDispatchMode, argument_of
from lightning_automodel._compat.transformers.models import use_kernels_without_memory
from lightning_automodel.distributed.random_numbers import generator_states, restore_generators
from lightning_automodel.modules.caches import caches_by_name, without_cache
from lightning_automodel.parallel.given_containers import copied


def twin_of(block: nn.Module) -> nn.Module:
    """Returns a copy of a ``block`` that is whole, on the meta device. It keeps none of its hooks."""
    memo: dict[int, Any] = {}
    for module in block.modules():
        for tensor in (*own_parameters(module).values(), *own_buffers(module).values()):
            if tensor is not None and id(tensor) not in memo:
                memo[id(tensor)] = _meta(tensor)
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig) and id(config) not in memo:
            memo[id(config)] = _config(config)
    twin = copy.deepcopy(block, memo)
    for module in twin.modules():
        remove_hooks(module)
    return twin


@dataclass(frozen=True, kw_only=True)
class WholeDraws:
    """What a block draws on one process.

    Attributes:
        shapes: of the draws, in order.
        is_complete: there are no others; else the twin could not go on.
        rows: of the batch.
        per_row: draws whose first dimension has ``rows`` parts, as it grows with the batch, by their places; draws of
            which that is not known are not in it.
        passed_over: modules below it that look at values, by name: they were taken to hand on what enters them, as
            experts do. What they draw is not known.
    """

    shapes: list[torch.Size]
    is_complete: bool
    rows: int
    per_row: dict[int, bool] = field(default_factory=dict)
    passed_over: list[str] = field(default_factory=list)


def whole_draws(
    twin: nn.Module, args: tuple, kwargs: dict[str, Any], shape_of: Callable[[Tensor], Sequence[int]]
) -> WholeDraws:
    """Calls ``twin`` on meta, as far as it runs without values.

    Args:
        twin: from :func:`twin_of`.
        args: of the block; and so the next.
        kwargs: a cache among them is left out.
        shape_of: the whole that a tensor is a slice of.
    """
    args, kwargs = caches_by_name(twin, args, kwargs)
    args, kwargs = _on_meta(args, shape_of), _on_meta(without_cache(kwargs), shape_of)
    mask = kwargs.get("attention_mask")
    if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 4):  # for kernels that the twin does not use
        kwargs["attention_mask"] = None
    first = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.ndim), None)
    rows = 1 if first is None else first.shape[0]
    found = _draws_of(twin, args, kwargs, rows)
    found = found if found.is_complete else _draws_of(twin, args, kwargs, rows, torch.device("meta"))
    if rows > 1 and any(len(shape) and shape[0] > rows and shape[0] % rows == 0 for shape in found.shapes):
        found.per_row.update(_draws_per_row(twin, args, kwargs, found))
    return found


def _draws_per_row(
    twin: nn.Module, args: tuple, kwargs: dict[str, Any], found: WholeDraws
) -> Iterator[tuple[int, bool]]:
    """Tell of each draw whether there are twice as many in a batch of twice the rows, or as many heads by chance."""

    def doubled(x: Tensor) -> list[int]:
        return [2 * x.shape[0], *x.shape[1:]] if x.ndim and x.shape[0] == found.rows else list(x.shape)

    args, kwargs = _on_meta(args, doubled), _on_meta(kwargs, doubled)
    larger = _draws_of(twin, args, kwargs, found.rows, None if found.is_complete else torch.device("meta"))
    for place, (one, other) in enumerate(zip(found.shapes, larger.shapes, strict=False)):
        if one[1:] == other[1:] and len(one) and other[0] in (one[0], 2 * one[0]):
            yield place, other[0] > one[0]


def _draws_of(
    twin: nn.Module, args: tuple, kwargs: dict[str, Any], rows: int, device: torch.device | None = None
) -> WholeDraws:
    """Calls ``twin``; tensors that its code makes are on ``device`` where it names none."""
    noted, states, is_complete, passed_over = _Note(), generator_states(), True, set[str]()
    others = random.getstate(), np.random.get_state()
    try:
        with torch.no_grad(), noted, device or nullcontext(), _passing_over(twin, noted, passed_over):
            twin.train()(*args, **kwargs)
    except Exception:  # the block itself looks at values, or a kernel at memory: what came before is known all the same
        is_complete = False
    finally:
        restore_generators(states)
        random.setstate(others[0])
        np.random.set_state(others[1])
    return WholeDraws(shapes=noted.shapes, is_complete=is_complete, rows=rows, passed_over=sorted(passed_over))


@contextmanager
def _passing_over(twin: nn.Module, noted: "_Note", found: set[str]) -> Generator[None, None, None]:
    """Let modules below ``twin`` that fail before they draw return their first argument; ``found`` gets their names."""
    changed = []
    for name, module in twin.named_modules():
        if name and isinstance(module.forward, MethodType):
            changed.append((module, module.__dict__.get("forward")))
            module.forward = _tried(name, module.forward, noted, found)
    try:
        yield
    finally:
        for module, forward in changed:
            del module.forward
            if forward is not None:
                module.forward = forward


def _tried(name: str, forward: Callable, noted: "_Note", found: set[str]) -> Callable:
    def try_it(*args: Any, **kwargs: Any) -> Any:
        before = len(noted.shapes)
        try:
            return forward(*args, **kwargs)
        except Exception:
            first = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
            if first is None or len(noted.shapes) > before:
                raise
            found.add(name)
            return torch.empty_like(first)

    return try_it


def _on_meta(value: Any, shape_of: Callable[[Tensor], Sequence[int]]) -> Any:
    """Copy ``value`` with tensors on meta, of the shapes that they have as a whole."""
    return copied(value, change=lambda x: torch.empty(shape_of(x), dtype=x.dtype, device="meta"))


def shape_of_draw(args: Sequence[Any]) -> torch.Size:
    """Returns the shape of what an operation draws that is called with ``args``; of attention, that of its weights."""
    first = args[0]
    if not isinstance(first, Tensor):
        place = place_of_shape(args)
        return torch.Size([first]) if place is None else torch.Size(args[place])
    if len(args) > 2 and isinstance(args[1], Tensor) and isinstance(args[2], Tensor) and first.ndim == 4:
        return torch.Size((*first.shape[:-1], args[1].shape[-2]))
    return first.shape


def place_of_shape(args: Sequence[Any]) -> int | None:
    """Find the shape among ``args`` of an operation that draws: behind bounds, say; a permutation has none."""
    return next((place for place, x in enumerate(args) if isinstance(x, list | tuple)), None)


def is_draw(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Tells whether ``operation`` draws from the default generators; attention that drops nothing does not."""
    may_draw = torch.Tag.nondeterministic_seeded in getattr(operation, "tags", ()) and bool(args)
    return may_draw and argument_of(operation, "dropout_p", args, kwargs) != 0


class _Note(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if is_draw(func, args, kwargs or {}):
            self.shapes.append(shape_of_draw(args))
        return func(*args, **(kwargs or {}))


def _meta(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta", requires_grad=False)
    return nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty


def _config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Choose kernels that run on meta; what they drop is as large as what torch's drops."""
    own = copy.deepcopy(config)
    use_kernels_without_memory(own)
    return own
