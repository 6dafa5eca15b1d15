"""Moves elements of tensors that lie in files before they are read, so that a rank reads only its box.

transformers converts weights on the way from files to parameters: it stacks experts, cuts a fused matrix, transposes.
Each such move of an :class:`UnreadTensor` is noted, and a box of the result is traced back to boxes in the files::

    cat([a, b], dim=1)[:, 5:8]    a has 6 columns    ->    a[:, 5:6] and b[:, 0:2]

What is no move (arithmetic, a reshape) is refused with :class:`NotAMove`: then all of it has to be read first.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_automodel._compat.torch.pytree import tree_map_only
from lightning_automodel._compat.torch.tensors import wrapper_tensor
from lightning_automodel.distributed.boxes import Span

aten: Any = torch.ops.aten
Spans = Sequence[Span]
Read = tuple[Any, Spans, Tensor]
"""An entry of a file, a box of it, and the memory that the box belongs into."""


class NotAMove(RuntimeError):
    """Raised for an operation that does more than move elements. No TypeError, which ``==`` swallows."""


class UnreadTensor(Tensor):
    """A tensor whose values are in files; made by :func:`unread` and by moves of others.

    Attributes:
        moved: where its elements are.
    """

    moved: "Moved"

    @staticmethod
    def __new__(cls, moved: "Moved", dtype: torch.dtype, device: torch.device) -> "UnreadTensor":
        """Make one that claims to lie on ``device``."""
        new = wrapper_tensor(cls, moved.shape, dtype=dtype, device=device)
        new.moved = moved
        return new

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"UnreadTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        move = _MOVES.get(func)
        if move is None or kwargs:
            raise NotAMove(f"{func} of a tensor that is not read")
        like = next(x for x in (args[0] if isinstance(args[0], list | tuple) else args) if isinstance(x, UnreadTensor))
        result = move(*tree_map_only(UnreadTensor, lambda x: x.moved, args))
        return _wrap(result, like)

    def fill(self, spans: Spans, target: Tensor) -> None:
        """Reads a box into ``target``, which has the shape of the box."""
        for entry, box, memory in self.moved.reads(spans, target):
            memory.copy_(entry[tuple(slice(*span) for span in box)] if box else entry[...])

    def read(self) -> Tensor:
        """Returns the whole tensor."""
        target = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self.fill([(0, size) for size in self.shape], target)
        return target.to(self.device)


def unread(entry: Any, dtype: torch.dtype | None, device: Any) -> UnreadTensor:
    """Returns an entry of a file (or a tensor, perhaps a mapped file), to be read in ``dtype`` and put on
    ``device``.
    """
    moved = Stored(tuple(entry.shape if isinstance(entry, Tensor) else entry.get_shape()), entry)
    return UnreadTensor(moved, dtype or entry.dtype, torch.device("cpu" if device is None else device))


def _wrap(result: Any, like: UnreadTensor) -> Any:
    if isinstance(result, Moved):
        return UnreadTensor(result, like.dtype, like.device)
    return [_wrap(part, like) for part in result]


# ---- where elements are ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moved:
    """A tensor of ``shape`` whose elements lie elsewhere: in files, or in tensors that were moved before."""

    shape: tuple[int, ...]

    def reads(self, spans: Spans, target: Tensor) -> Iterator[Read]:
        """List the reads that bring the box ``spans`` into ``target``; none for an empty one."""
        if all(start < stop for start, stop in spans):
            yield from self._reads(list(spans), target)

    def _reads(self, spans: list[Span], target: Tensor) -> Iterator[Read]:
        raise NotImplementedError


@dataclass(frozen=True)
class Stored(Moved):
    """An entry of a file."""

    entry: Any

    def _reads(self, spans: list[Span], target: Tensor) -> Iterator[Read]:
        yield self.entry, spans, target


@dataclass(frozen=True)
class Joined(Moved):
    """Several one after the other along a dim."""

    parts: Sequence[Moved]
    dim: int

    def _reads(self, spans: list[Span], target: Tensor) -> Iterator[Read]:
        (start, stop), offset = spans[self.dim], 0
        for part in self.parts:
            size = part.shape[self.dim]
            first, last = max(start, offset), min(stop, offset + size)
            if first < last:
                box = [*spans[: self.dim], (first - offset, last - offset), *spans[self.dim + 1 :]]
                yield from part.reads(box, target.narrow(self.dim, first - start, last - first))
            offset += size


@dataclass(frozen=True)
class Narrowed(Moved):
    """The elements from ``start`` on along a dim."""

    whole: Moved
    dim: int
    start: int

    def _reads(self, spans: list[Span], target: Tensor) -> Iterator[Read]:
        first, last = spans[self.dim]
        spans[self.dim] = (first + self.start, last + self.start)
        yield from self.whole.reads(spans, target)


@dataclass(frozen=True)
class Selected(Moved):
    """The elements at one index of a dim, which is gone."""

    whole: Moved
    dim: int
    index: int

    def _reads(self, spans: list[Span], target: Tensor) -> Iterator[Read]:
        spans.insert(self.dim, (self.index, self.index + 1))
        yield from self.whole.reads(spans, target.unsqueeze(self.dim))


@dataclass(frozen=True)
class Unsqueezed(Moved):
    """One more dim, of size 1."""

    inner: Moved
    dim: int

    def _reads(self, spans: list[Span], target: Tensor) -> Iterator[Read]:
        del spans[self.dim]
        yield from self.inner.reads(spans, target.select(self.dim, 0))


@dataclass(frozen=True)
class Permuted(Moved):
    """Dims in another order."""

    inner: Moved
    order: tuple[int, ...]

    def _reads(self, spans: list[Span], target: Tensor) -> Iterator[Read]:
        back = [self.order.index(dim) for dim in range(len(self.order))]
        yield from self.inner.reads([spans[dim] for dim in back], target.permute(back))


# ---- moves -----------------------------------------------------------------------------------------------------------


def _join(parts: Sequence[Any], dim: int = 0) -> Moved:
    if not all(isinstance(part, Moved) for part in parts):
        raise NotAMove("read and unread tensors in one")
    dim = dim % len(parts[0].shape)
    shapes = [part.shape[:dim] + part.shape[dim + 1 :] for part in parts]
    if len(set(shapes)) > 1 or len({len(part.shape) for part in parts}) > 1:
        raise NotAMove("tensors of different shapes in one")
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    return Joined(tuple(shape), list(parts), dim)


def _stack(parts: Sequence[Any], dim: int = 0) -> Moved:
    dim = dim % (len(parts[0].shape) + 1)
    return _join([_unsqueeze(part, dim) for part in parts], dim)


def _unsqueeze(x: Moved, dim: int) -> Moved:
    dim = dim % (len(x.shape) + 1)
    return Unsqueezed((*x.shape[:dim], 1, *x.shape[dim:]), x, dim)


def _squeeze(x: Moved, dim: int) -> Moved:
    return _select(x, dim, 0) if x.shape[dim] == 1 else x


def _select(x: Moved, dim: int, index: int) -> Moved:
    dim = dim % len(x.shape)
    return Selected(x.shape[:dim] + x.shape[dim + 1 :], x, dim, index % x.shape[dim])


def _unbind(x: Moved, dim: int = 0) -> list[Moved]:
    return [_select(x, dim, index) for index in range(x.shape[dim])]


def _slice(x: Moved, dim: int = 0, start: int | None = None, stop: int | None = None, step: int = 1) -> Moved:
    if step != 1:
        raise NotAMove("a slice with gaps")
    dim = dim % len(x.shape)
    first, last, _ = slice(start, stop).indices(x.shape[dim])
    return Narrowed((*x.shape[:dim], max(0, last - first), *x.shape[dim + 1 :]), x, dim, first)


def _split(x: Moved, size: int, dim: int = 0) -> list[Moved]:
    return [_slice(x, dim, start, start + size) for start in range(0, x.shape[dim], size)]


def _split_with_sizes(x: Moved, sizes: Sequence[int], dim: int = 0) -> list[Moved]:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [_slice(x, dim, start, start + size) for start, size in zip(starts, sizes, strict=True)]


def _permute(x: Moved, order: Sequence[int]) -> Moved:
    order = tuple(dim % len(x.shape) for dim in order)
    return Permuted(tuple(x.shape[dim] for dim in order), x, order)


def _transpose(x: Moved, one: int = 0, other: int = 1) -> Moved:
    order = list(range(len(x.shape)))
    order[one], order[other] = order[other], order[one]
    return _permute(x, order)


_MOVES: dict[Any, Callable[..., Any]] = {
    aten.cat.default: _join,
    aten.stack.default: _stack,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.dim: _squeeze,
    aten.select.int: _select,
    aten.unbind.int: _unbind,
    aten.slice.Tensor: _slice,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split_with_sizes,
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.t.default: _transpose,
    aten.detach.default: lambda x: x,
    aten.alias.default: lambda x: x,
    aten.clone.default: lambda x: x,
}
