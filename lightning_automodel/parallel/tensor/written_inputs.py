"""Modules that write into what enters them: the caller's tensor is written, too, where a collective made another one.

::

    one process      x --------------- mlp: x *= noise, ... ---      residual = x: the noise is in it

    split over tp    x -- copy in, or gather -- mlp: x' *= noise     x' is another tensor, and a clone besides
                     |                               |
                     +---------- x *= noise <--------+               the same write; of rows, where x is a slice of them
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_automodel._compat.torch.tensors import TorchDispatchMode, base_of, name_of_operation, version_of
from lightning_automodel.distributed.collectives import shard_bounds
from lightning_automodel.distributed.logs import warn_once
from lightning_automodel.modules.forward import SharedByCopies, wrap_forward
from lightning_automodel.modules.structure import class_names, find_blocks
from lightning_automodel.parallel.tensor.stream import Stream, is_float
from lightning_automodel.parallel.tensor.twins import is_draw
from lightning_automodel.plans import Layout
from lightning_automodel.plans.styles import Enter

NOISES = ("jitter_noise", "router_jitter_noise", "input_jitter_noise")
"""Attributes of routers that are multiplied by noise while they train."""
_WRITES = "_writes_into_what_enters"
_COPYING = (Enter.COPY, Enter.COPY_ALL, Enter.SPLIT, Enter.DIVIDE)


def install_written_inputs(model: nn.Module, layout: Layout, streams: Mapping[str, Stream]) -> None:
    """Let modules of ``model`` behind a collective write into what their callers hold, while they train.

    Args:
        model: whose collectives are installed.
        layout: of ``model``.
        streams: residual streams that are cut on the sequence, by the names of blocks.
    """
    found = dict(_behind_collectives(layout, streams))
    for name, stream in found.items():
        module = model.get_submodule(name)
        if _multiplies_by_noise(module):
            WrittenInput(stream).install(module)
    for block in find_blocks(model).values():
        block.__dict__[_WRITES] = any(_WRITES in module.__dict__ for module in block.modules())


def writes_into_inputs(block: nn.Module) -> bool:
    """Tells whether a compiled graph of ``block`` would leave out what its children write into what enters them."""
    return block.training and block.__dict__.get(_WRITES, False)


def _behind_collectives(layout: Layout, streams: Mapping[str, Stream]) -> Iterator[tuple[str, Stream | None]]:
    children = layout.sequence.children if layout.sequence is not None else {}
    of_child = {child: streams[block] for block, found in children.items() if block in streams for child in found}
    yield from of_child.items()
    for name, module_layout in layout.modules.items():
        if name not in of_child and module_layout.enter in _COPYING:
            yield name, None


def _multiplies_by_noise(module: nn.Module) -> bool:
    return any(getattr(m, name, None) for m in module.modules() for name in NOISES)


class WrittenInput(SharedByCopies):
    """The hooks around one module that writes into its first argument.

    Args:
        stream: that is gathered where it enters the module; ``None``: it is whole.
    """

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def install(self, module: nn.Module) -> None:
        """Run these hooks in every training pass of ``module``, around its collectives."""
        module.__dict__[_WRITES] = True
        module.register_forward_pre_hook(self.enter, with_kwargs=True, prepend=True)
        wrap_forward(module, _noting)
        module.register_forward_hook(self.leave, with_kwargs=True)

    def enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        """Keep what the caller holds, and hand on a copy: a collective may return a view."""
        if not module.training:
            return None
        module.__dict__[_WRITES] = _Pass(held := _first(args, kwargs))
        return _replaced(held, held.clone(), args, kwargs)

    def leave(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        """Write into what the caller holds what the module wrote: outside of a part that is computed again."""
        kept = module.__dict__[_WRITES]
        module.__dict__[_WRITES] = True
        if isinstance(kept, _Pass):
            for write in kept.writes:
                operands = tuple(self._cut(x, kept.held) for x in write.operands)
                write.function(kept.held, *operands, **write.options)

    def _cut(self, operand: Any, held: Tensor) -> Any:
        stream = self.stream
        if stream is None or not stream.is_whole(operand) or stream.is_whole(held):
            return operand
        start, length = shard_bounds(operand.shape[1], stream.group.size(), stream.group.rank())
        return operand.narrow(1, start, length)


@dataclass
class _Write:
    """An operation in place on a tensor as a whole, and its operands in the shape of that tensor."""

    function: Callable
    operands: tuple
    options: dict[str, Any]


@dataclass
class _Pass:
    """What the caller holds in one forward pass, and what was written into the copy."""

    held: Tensor
    writes: list[_Write] = field(default_factory=list)


def _noting(module: nn.Module, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run ``forward`` on a clone, which may be written to, and note what is written."""
    if torch.compiler.is_compiling() or not module.training:
        return forward(*args, **kwargs)
    first = _first(args, kwargs)
    clone = first.clone(memory_format=torch.contiguous_format)
    args, kwargs = _replaced(first, clone, args, kwargs)
    kept = module.__dict__[_WRITES]
    with _Watch(clone) as watch:
        output = forward(*args, **kwargs)
    if version_of(clone) != len(watch.writes):
        warn_once(_cannot_repeat(module))
    if isinstance(kept, _Pass):  # else a recomputation: what the caller holds is written
        kept.writes = watch.writes
    return output


class _Watch(TorchDispatchMode):
    """Notes what is written into ``watched`` as a whole, in whatever shape."""

    def __init__(self, watched: Tensor) -> None:
        super().__init__()
        self.watched = watched
        self.writes: list[_Write] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if name_of_operation(func).endswith("_") and self._is_whole(args[0]) and not is_draw(func, args, kwargs or {}):
            operands = tuple(x.reshape(self.watched.shape) if self._has_as_many(x) else x for x in args[1:])
            if args[0].shape == self.watched.shape or all(map(self._fits, args[1:])):
                self.writes.append(_Write(func, operands, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _is_whole(self, value: Any) -> bool:
        is_view = isinstance(value, Tensor) and (value is self.watched or base_of(value) is self.watched)
        return is_view and self._has_as_many(value) and value.is_contiguous()

    def _has_as_many(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.numel() == self.watched.numel()

    def _fits(self, value: Any) -> bool:
        return not isinstance(value, Tensor) or value.ndim == 0 or self._has_as_many(value)


def _replaced(old: Tensor, new: Tensor, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    return tuple(new if x is old else x for x in args), {name: new if x is old else x for name, x in kwargs.items()}


def _first(args: tuple, kwargs: dict[str, Any]) -> Tensor:
    return next(x for x in (*args, *kwargs.values()) if is_float(x))


def _cannot_repeat(module: nn.Module) -> str:
    return (
        f"a {class_names(module)[0]} writes into what enters it in a way that cannot be repeated on the tensor that "
        "its caller holds: what follows sees that tensor as it was before"
    )
