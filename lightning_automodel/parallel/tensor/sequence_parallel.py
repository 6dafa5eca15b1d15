"""Sequence parallelism: between the children of a block, the residual stream is cut on the sequence over tp.

::

    whole --[split]--> block --> block --> ... --> last block --[gather]--> whole
                         |
        stream (slice) --+--> norm --> gather | attention, heads split | reduce-scatter --> + --> norm --> ...

What works on single tokens (norms, residual additions, dropout) sees a slice; its parameters have partial gradients.
What mixes tokens or is split over tp sees the whole sequence. Positions and masks stay those of the whole sequence,
because the stream is cut at the first block and not at the embedding.
"""

import inspect
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_automodel.distributed.collectives import (
    copy_in,
    gather,
    gather_in,
    reduce_out,
    scatter_out,
    shard_bounds,
    split,
)
from lightning_automodel.distributed.logs import warn_once
from lightning_automodel.modules.forward import Context, Snapshot, keep_for_recomputation
from lightning_automodel.modules.structure import class_names
from lightning_automodel.plans.sequence import STREAM_ARGUMENTS, SequenceLayout

LENGTH = "_length_of_whole_sequence"
"""The attribute of a slice that says how many tokens the whole sequence has."""


@dataclass
class Stream:
    """The residual stream of one list of blocks while it runs.

    Attributes:
        group: of the tp axis.
        beside: streams that blocks may hold beside each other for each token, as hyper-connections do.
        length: tokens of the whole sequence; ``None`` while the stream is whole.
        batch: rows of the batch.
        width: features of the stream.
        running: between the first and the last block.
    """

    group: ProcessGroup
    beside: int | None = None
    length: int | None = None
    batch: int | None = None
    width: int | None = None
    running: bool = False

    def length_of(self, value: Tensor) -> int | None:
        """Tokens to cut of a ``value`` that enters the first block; ``None`` where it must stay whole.

        That is where there are too few to cut, as in generation token by token, or where it is not known which
        dimension is the sequence, as with gemma3n's [streams, batch, seq, features].
        """
        if not self.has_tokens(value) or value.shape[1] < 2 * self.group.size():
            return None
        return value.shape[1]

    def has_tokens(self, value: Tensor) -> bool:
        """Tells whether ``value`` is a residual stream: [batch, seq, features] or [batch, seq, beside, features]."""
        return value.ndim == 3 or (value.ndim == 4 and value.shape[2] == self.beside)

    def is_slice(self, value: Any) -> bool:
        """Tells whether ``value`` is this rank's slice of the sequence: [batch, slice, features], or several beside
        each
        other, [batch, slice, n, width of the stream] or [batch, slice, streams beside each other, n].
        """
        return self.length is not None and self._has_rows(value, self._rows())

    def resembles_slice(self, value: Tensor) -> bool:
        """Tells whether ``value`` has the shape of any rank's slice; all ranks find the same."""
        if self.length is None:
            return False
        return any(self._has_rows(value, self._rows(rank)) for rank in range(self.group.size()))

    def is_whole(self, value: Any) -> bool:
        """Tells whether ``value`` holds the whole sequence, in the same shapes."""
        return self.length is not None and self._has_rows(value, self.length)

    def is_flat(self, value: Any) -> bool:
        """Tells whether ``value`` is [batch x whole sequence, ...]."""
        return self.length is not None and self._is_flat(value, self.length)

    def is_flat_slice(self, value: Any) -> bool:
        """Tells whether ``value`` is [batch x slice, ...]."""
        return self.length is not None and self._is_flat(value, self._rows())

    def runs_flat(self, args: tuple, kwargs: dict, whole: bool) -> bool:
        """Tells whether a module is called with tokens of all rows of the batch in one dimension: its first argument is
        [batch x slice, width of the stream], or the same of the ``whole`` sequence.
        """
        first: Any = next(iter((*args, *kwargs.values())), None)
        if not _is_float(first) or first.ndim != 2 or first.shape[1] != self.width:
            return False
        return self.is_flat(first) if whole else self.is_flat_slice(first)

    def unflatten(self, value: Tensor, whole: bool) -> Tensor:
        """[batch x tokens, ...] to [batch, tokens, ...]."""
        return value.unflatten(0, (self.batch, self.length if whole else self._rows()))

    def _rows(self, rank: int | None = None) -> int:
        assert self.length is not None
        return shard_bounds(self.length, self.group.size(), self.group.rank() if rank is None else rank)[1]

    def _is_flat(self, value: Any, rows: int) -> bool:
        return isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == self.batch * rows  # type: ignore[operator]

    def _has_rows(self, value: Any, rows: int) -> bool:
        if not _is_float(value) or value.ndim not in (3, 4) or value.shape[1] != rows:
            return False
        return value.ndim == 3 or value.shape[-1] == self.width or value.shape[2] == self.beside


def install_sequence_parallel(model: nn.Module, group: ProcessGroup, layout: SequenceLayout) -> dict[str, Stream]:
    """Puts the collectives of ``layout`` around blocks and their children.

    Returns:
        the stream that each block runs on, by the block's name.
    """
    streams: dict[str, Stream] = {}
    for blocks in layout.block_lists:
        stream = Stream(group, layout.beside)
        for name in blocks:
            streams[name] = stream
            block = model.get_submodule(name)
            enter = _enter_block(stream, block, name, first=name == blocks[0])
            block.register_forward_pre_hook(enter, with_kwargs=True)
            block.register_forward_hook(_leave_block(stream, last=name == blocks[-1]))
            keep_for_recomputation(block, _stream_again(stream))
            for child, closed in layout.children[name].items():
                module = model.get_submodule(child)
                module.register_forward_pre_hook(_enter_child(stream, closed), with_kwargs=True)
                module.register_forward_hook(_leave_child(stream, closed, child), with_kwargs=True)
    return streams


# ---- blocks ----------------------------------------------------------------------------------------------------------


def _enter_block(stream: Stream, module: nn.Module, block: str, first: bool) -> Callable:
    """Returns the first block cuts the stream; all of them cut what arrives beside it, token by token (per-layer
    inputs).
    """
    names = list(inspect.signature(module.forward).parameters)
    cut_names = {names[0], *STREAM_ARGUMENTS}

    def hook(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        value = given[names[0]]
        known = getattr(value, LENGTH, None)
        if first and known is None:
            stream.running, stream.length = True, stream.length_of(value)
            stream.batch, stream.width = value.shape[0], value.shape[-1]
            _warn_of_other_streams(stream, block, value)
        elif hasattr(value, LENGTH):
            stream.length = known
        elif not stream.running:
            raise ValueError(_unknown_length(module))
        if name := _resembling(stream, {n: x for n, x in given.items() if n not in cut_names}):
            if not first:
                raise ValueError(_cannot_tell(module, name, stream))
            stream.length = None

        def enter(name: str, x: Any) -> Any:
            cut = name in cut_names and stream.is_whole(x) and not stream.is_slice(x)
            return split(x, 1, stream.group) if cut else x

        return tuple(map(enter, names, args)), {name: enter(name, x) for name, x in kwargs.items()}

    return hook


def _resembling(stream: Stream, beside: dict[str, Any]) -> str | None:
    """Returns the name of an argument beside the stream that is whole and looks like a slice: the states of an
    encoder may have
    as many rows by chance. Slices are told from the rest by their shape, so such a stream is left whole.
    """
    for name, value in beside.items():
        if any(getattr(x, LENGTH, None) is None and stream.resembles_slice(x) for x in _tensors(value)):
            return name
    return None


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for entry in value:
            yield from _tensors(entry)


def _warn_of_other_streams(stream: Stream, block: str, value: Tensor) -> None:
    """Compiled graphs have no room for warnings."""
    if not stream.has_tokens(value) and not torch.compiler.is_compiling():
        warn_once(
            f"sequence_parallel=True has no effect on {block} and the blocks behind it: what enters is "
            f"{list(value.shape)}, and only a residual stream [batch, seq, features] is cut; it stays whole, and exact"
        )


def _leave_block(stream: Stream, last: bool) -> Callable:
    def hook(module: nn.Module, args: tuple, output: Any) -> Any:
        length = stream.length

        def leave(x: Any) -> Any:
            if length is None or not stream.is_slice(x):
                return x
            return gather(x, 1, length, stream.group) if last else x

        outputs = tuple(map(leave, output if isinstance(output, tuple) else (output,)))
        if last:
            stream.length, stream.running = None, False
        else:
            _mark(stream, outputs, length)
        return outputs if isinstance(output, tuple) else outputs[0]

    return hook


def _mark(stream: Stream, outputs: tuple, length: int | None) -> None:
    """Slices carry the length of the whole sequence to the next block, and a whole stream carries ``None``."""
    for i, x in enumerate(outputs):
        if isinstance(x, Tensor) and (i == 0 or stream.is_slice(x)):
            setattr(x, LENGTH, length)


def _stream_again(stream: Stream) -> Snapshot:
    """Returns the backward pass runs single blocks again, when their stream is long whole."""

    def snapshot(block: nn.Module) -> Context:
        then = stream.length, stream.batch, stream.width

        @contextmanager
        def again() -> Generator[None, None, None]:
            now = stream.length, stream.batch, stream.width
            stream.length, stream.batch, stream.width = then
            try:
                yield
            finally:
                stream.length, stream.batch, stream.width = now

        return again

    return snapshot


# ---- children --------------------------------------------------------------------------------------------------------


def _enter_child(stream: Stream, closed: bool) -> Callable:
    """Returns a child sees the whole sequence; a boundary of tensor parallelism sums the gradients of what it takes."""

    def join(value: Tensor) -> Tensor:
        assert stream.length is not None
        return (gather_in if closed else gather)(value, 1, stream.length, stream.group)

    def enter(value: Any, flat: bool) -> Any:
        if flat and stream.is_flat_slice(value):
            return join(stream.unflatten(value, whole=False)).flatten(0, 1)
        if stream.is_slice(value):
            return join(value)
        if isinstance(value, tuple | list):
            return type(value)(enter(x, flat) for x in value)
        if closed and _is_float(value):
            return copy_in(value, stream.group)
        return value

    def hook(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        flat = stream.runs_flat(args, kwargs, whole=False)
        return tuple(enter(x, flat) for x in args), {name: enter(x, flat) for name, x in kwargs.items()}

    return hook


def _leave_child(stream: Stream, closed: bool, name: str) -> Callable:
    def cut(value: Tensor) -> Tensor:
        return scatter_out(value, 1, stream.group) if closed else split(value, 1, stream.group)

    def cut_flat(value: Tensor) -> Tensor:
        return cut(stream.unflatten(value, whole=True)).flatten(0, 1)

    def leave(value: Any) -> Any:
        if stream.is_whole(value):
            return cut(value)
        if _is_float(value) and value.ndim == 2 and stream.is_flat(value):
            return cut_flat(value)
        if closed and stream.length is None:
            return reduce_out(value, stream.group)
        if closed:
            raise ValueError(_cannot_cut(name, value, stream))
        return value

    def leave_beside(value: Any, flat: bool) -> Any:
        if closed:
            return value
        if stream.is_whole(value):
            return cut(value)
        return cut_flat(value) if flat and stream.is_flat(value) else value

    def hook(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        if not isinstance(output, tuple):
            return leave(output)
        flat = stream.runs_flat(args, kwargs, whole=True)
        return (leave(output[0]), *(leave_beside(x, flat) for x in output[1:]))

    return hook


def _cannot_cut(name: str, value: Any, stream: Stream) -> str:
    shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
    return (
        f"sequence parallelism cannot cut the output of {name} ({shape}) on a sequence of {stream.length} tokens; "
        "use sequence_parallel=False"
    )


def _cannot_tell(block: nn.Module, name: str, stream: Stream) -> str:
    return (
        f"sequence parallelism cannot tell {name}, which enters a {class_names(block)[0]} but not the first block, "
        f"from a slice of the {stream.length} tokens; pad the tokens to another length, or use sequence_parallel=False"
    )


def _unknown_length(block: nn.Module) -> str:
    return (
        f"a {class_names(block)[0]} runs outside of its model's forward pass and cannot know how long the sequence is: "
        "activation checkpointing with sequence_parallel=True needs use_reentrant=False"
    )


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
