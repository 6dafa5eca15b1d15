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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_automodel.collectives import copy_in, gather, gather_in, reduce_out, scatter_out, shard_bounds, split
from lightning_automodel.plans.sequence import STREAM_ARGUMENTS, SequenceLayout

_LENGTH = "_length_of_whole_sequence"


@dataclass
class Stream:
    """The residual stream of one list of blocks while it runs.

    Attributes:
        group: of the tp axis.
        length: tokens of the whole sequence; ``None`` while the stream is whole.
        width: features of the stream.
    """

    group: ProcessGroup
    length: int | None = None
    width: int | None = None

    def is_slice(self, value: Any) -> bool:
        """Whether ``value`` is this rank's slice of the sequence.

        That is [batch, slice, features], or several such beside each other: [batch, slice, n, width of the stream].
        """
        if self.length is None:
            return False
        return self._has_rows(value, shard_bounds(self.length, self.group.size(), self.group.rank())[1])

    def is_whole(self, value: Any) -> bool:
        """Whether ``value`` holds the whole sequence, in the same shapes."""
        return self.length is not None and self._has_rows(value, self.length)

    def is_flat(self, value: Any) -> bool:
        """Whether ``value`` is [batch x whole sequence, features]."""
        return self.length is not None and _is_float(value) and value.ndim == 2 and not value.shape[0] % self.length

    def _has_rows(self, value: Any, rows: int) -> bool:
        if not _is_float(value) or value.ndim not in (3, 4) or value.shape[1] != rows:
            return False
        return value.ndim == 3 or value.shape[-1] == self.width


def install_sequence_parallel(model: nn.Module, group: ProcessGroup, layout: SequenceLayout) -> dict[str, Stream]:
    """Puts the collectives of ``layout`` around blocks and their children.

    Returns:
        the stream that each block runs on, by the block's name.
    """
    streams: dict[str, Stream] = {}
    for blocks in layout.block_lists:
        stream = Stream(group)
        for name in blocks:
            streams[name] = stream
            block = model.get_submodule(name)
            block.register_forward_pre_hook(_enter_block(stream, block, first=name == blocks[0]), with_kwargs=True)
            block.register_forward_hook(_leave_block(stream, last=name == blocks[-1]))
            for child, closed in layout.children[name].items():
                module = model.get_submodule(child)
                module.register_forward_pre_hook(_enter_child(stream, closed), with_kwargs=True)
                module.register_forward_hook(_leave_child(stream, closed, child))
    return streams


# ---- blocks ----------------------------------------------------------------------------------------------------------


def _enter_block(stream: Stream, module: nn.Module, first: bool) -> Callable:
    """The first block cuts the stream; all of them cut what arrives beside it, token by token (per-layer inputs)."""
    names = list(inspect.signature(module.forward).parameters)

    def hook(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        value = args[0] if args else kwargs[STREAM_ARGUMENTS[0]]
        known = getattr(value, _LENGTH, None)
        if known is not None:
            stream.length = known  # also when the backward pass runs this block again
        elif first:
            stream.length, stream.width = _length(stream, value), value.shape[-1]

        def enter(name: str, x: Any) -> Any:
            cut = name in STREAM_ARGUMENTS and stream.is_whole(x) and not stream.is_slice(x)
            return split(x, 1, stream.group) if cut else x

        return tuple(map(enter, names, args)), {name: enter(name, x) for name, x in kwargs.items()}

    return hook


def _length(stream: Stream, value: Tensor) -> int | None:
    """Tokens to cut; ``None`` leaves a stream whole that is too short to cut, as in generation token by token."""
    return value.shape[1] if value.ndim == 3 and value.shape[1] >= 2 * stream.group.size() else None


def _leave_block(stream: Stream, last: bool) -> Callable:
    def hook(module: nn.Module, args: tuple, output: Any) -> Any:
        if stream.length is None:
            return output
        length = stream.length

        def leave(x: Any) -> Any:
            if not stream.is_slice(x):
                return x
            if last:
                return gather(x, 1, length, stream.group)
            setattr(x, _LENGTH, length)
            return x

        output = tuple(map(leave, output)) if isinstance(output, tuple) else leave(output)
        if last:
            stream.length = None
        return output

    return hook


# ---- children --------------------------------------------------------------------------------------------------------


def _enter_child(stream: Stream, closed: bool) -> Callable:
    """A child sees the whole sequence; a boundary of tensor parallelism sums the gradients of what it takes."""

    def enter(value: Any) -> Any:
        if stream.is_slice(value):
            assert stream.length is not None
            return (gather_in if closed else gather)(value, 1, stream.length, stream.group)
        if isinstance(value, tuple | list):
            return type(value)(map(enter, value))
        if closed and _is_float(value):
            return copy_in(value, stream.group)
        return value

    def hook(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return tuple(map(enter, args)), {name: enter(value) for name, value in kwargs.items()}

    return hook


def _leave_child(stream: Stream, closed: bool, name: str) -> Callable:
    def cut(value: Tensor) -> Tensor:
        return scatter_out(value, 1, stream.group) if closed else split(value, 1, stream.group)

    def leave(value: Any) -> Any:
        if stream.is_whole(value):
            return cut(value)
        if stream.is_flat(value):
            return cut(value.unflatten(0, (-1, stream.length))).flatten(0, 1)
        if closed and stream.length is None:
            return reduce_out(value, stream.group)
        if closed:
            raise ValueError(_cannot_cut(name, value, stream))
        return value

    def leave_all(output: Any) -> Any:
        if not isinstance(output, tuple):
            return leave(output)
        rest = output[1:] if closed else tuple(cut(x) if stream.is_whole(x) else x for x in output[1:])
        return (leave(output[0]), *rest)

    def hook(module: nn.Module, args: tuple, output: Any) -> Any:
        return leave_all(output)

    return hook


def _cannot_cut(name: str, value: Any, stream: Stream) -> str:
    shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
    return (
        f"sequence parallelism cannot cut the output of {name} ({shape}) on a sequence of {stream.length} tokens; "
        "use sequence_parallel=False"
    )


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
