"""The residual stream of a list of blocks under sequence parallelism, and the three states in which code sees it.

A sequence of 12 tokens on tp=4 (the numbers are tokens)::

                       GPU 0         GPU 1         GPU 2         GPU 3
    whole              0-11          0-11          0-11          0-11          ``length`` is ``None``
      |  first block: split
      v
    cut                0-2           3-5           6-8           9-11          ``length`` is 12
      |  child: gather        ^  child: reduce-scatter, or split where it is no boundary
      v                       |
    gathered           0-11          0-11          0-11          0-11          ``length`` is 12; inside of a child
                                                                               that mixes tokens or is split over tp
    cut  --  last block: gather  -->  whole

A sequence of fewer than two tokens a rank is never cut. Which state a tensor is in, its shape tells: as many tokens as
``length``, or as this rank has of them. Between two blocks a cut stream carries its length (:data:`LENGTH`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_automodel.distributed.collectives import shard_bounds

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
        is_alone: a user calls a block, and sees what enters and leaves it: the stream is whole.
    """

    group: ProcessGroup
    beside: int | None = None
    length: int | None = None
    batch: int | None = None
    width: int | None = None
    running: bool = False
    is_alone: bool = False

    def length_of(self, value: Tensor) -> int | None:
        """Count the tokens to cut of a ``value`` that enters the first block; ``None`` where it must stay whole.

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
        if not is_float(first) or first.ndim != 2 or first.shape[1] != self.width:
            return False
        return self.is_flat(first) if whole else self.is_flat_slice(first)

    def unflatten(self, value: Tensor, whole: bool) -> Tensor:
        """Turn [batch x tokens, ...] into [batch, tokens, ...]."""
        return value.unflatten(0, (self.batch, self.length if whole else self._rows()))

    def mark(self, outputs: tuple | list) -> None:
        """Attach the length of the whole sequence to slices, and ``None`` to a whole stream, for the next block."""
        for i, x in enumerate(outputs):
            if isinstance(x, Tensor) and (i == 0 or self.is_slice(x)):
                setattr(x, LENGTH, self.length)

    def resembling(self, beside: dict[str, Any]) -> str | None:
        """Find an argument beside the stream that is whole and looks like a slice, by its name.

        The states of an encoder may have as many rows by chance. Slices are told from the rest by their shape, so such
        a stream is left whole.
        """
        for name, value in beside.items():
            if any(getattr(x, LENGTH, None) is None and self.resembles_slice(x) for x in _tensors(value)):
                return name
        return None

    def _rows(self, rank: int | None = None) -> int:
        assert self.length is not None
        return shard_bounds(self.length, self.group.size(), self.group.rank() if rank is None else rank)[1]

    def _is_flat(self, value: Any, rows: int) -> bool:
        return isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == self.batch * rows  # type: ignore[operator]

    def _has_rows(self, value: Any, rows: int) -> bool:
        if not is_float(value) or value.ndim not in (3, 4) or value.shape[1] != rows:
            return False
        return value.ndim == 3 or value.shape[-1] == self.width or value.shape[2] == self.beside


def is_float(value: Any) -> bool:
    """Tells whether ``value`` is a tensor of floating-point numbers."""
    return isinstance(value, Tensor) and value.is_floating_point()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for entry in value:
            yield from _tensors(entry)
