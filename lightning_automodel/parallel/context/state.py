"""What the hooks of context parallelism know: of one call of a model, and of the stream of one list of blocks.

A sequence of 16 tokens on cp=2, balanced (the numbers are tokens)::

                       GPU 0            GPU 1
    whole              0-15             0-15             ``rows`` is ``None``
      |  first block: cut
      v
    rows               0-3, 12-15       4-7, 8-11        ``rows`` says who holds what
      |  child: join          ^  child: cut
      v                       |
    whole again        0-15             0-15             inside of a child that is no attention on rows
    rows  --  the model that holds the blocks: to the head as rows, whole to everything else
"""

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_automodel.distributed.logs import log_once
from lightning_automodel.distributed.random_numbers import drawing_aside
from lightning_automodel.distributed.sequence_rows import Bounds, Rows, gather_parts
from lightning_automodel.modules.structure import class_names
from lightning_automodel.parallel.context.exchange_all_to_all import elements_moved, why_not
from lightning_automodel.parallel.context.exchange_gather import seen_keys
from lightning_automodel.parallel.context.masks import RowMasks, building_rows
from lightning_automodel.plans.context import BlockList


@dataclass
class Pass:
    """One call of a model, from outside in: what its parts know of each other.

    Attributes:
        group: ranks of the axis cp.
        balanced: how sequences are cut.
        exchange: "gather", "all_to_all" or "auto".
        depth: models that are running inside of each other.
        allowed: the stream may be cut: nobody asked for caches or for scores.
        leaves_rows: hidden states may leave the model that runs the blocks as rows.
        has_labels: the loss is computed inside.
        gave_whole: rows were gathered for what follows, which may run blocks once more.
        shape: batch and tokens of what the model around the blocks reads.
        rows: of the last list of blocks that ran; ``None``: it ran on the whole sequence.
        batch: rows of the batch.
        row_masks: what mask functions build while the model around the blocks runs; ``None``: whole masks.
        building: what ends that.
    """

    group: ProcessGroup
    balanced: bool
    exchange: str
    depth: int = 0
    allowed: bool = False
    leaves_rows: bool = False
    has_labels: bool = False
    gave_whole: bool = False
    shape: tuple[int, ...] = ()
    rows: Rows | None = None
    batch: int = 0
    row_masks: RowMasks | None = None
    building: ExitStack = field(default_factory=ExitStack)

    def build_row_masks(self) -> None:
        """Build masks of the sequence by rows from now on, unless heads are exchanged, which needs them whole."""
        rows = self.divide(self.shape[1]) if len(self.shape) == 2 and self.exchange != "all_to_all" else None
        if rows is not None:
            self.row_masks = RowMasks(rows)
            self.building.enter_context(building_rows(self.row_masks))

    def stop_building(self) -> None:
        """Build whole masks again."""
        self.building.close()
        self.row_masks = None

    @property
    def scale(self) -> float:
        """Return the factor of gradients that are averaged over the ranks, but are terms of one sum."""
        return float(self.group.size())

    def divide(self, length: int) -> Rows | None:
        """Cut a sequence; ``None`` if it is too short to give every chunk two tokens and every rank some."""
        chunks = self.group.size() * (2 if self.balanced else 1)
        rows = Rows.divide(length, self.group, self.balanced)
        return rows if self.allowed and length >= 2 * chunks and min(rows.counts) > 1 else None


@dataclass
class StreamOnRows:
    """The stream of one list of blocks while it runs.

    Attributes:
        call: of the model that runs it.
        entry: the blocks.
        rows: who holds what; ``None``: the stream is whole.
        batch: rows of the batch.
        no_rows: names of arguments of blocks that were something else than the stream when the first one was entered.
        beside: by their identity, what the block that runs was given under these names: no rows, whatever its shape.
        cut_already: rows of masks and tables of this forward pass, beside the whole ones, by the identity of those.
        row_masks: those of the call, also while a block is computed again.
        masks: by the identity of a mask, the mask, its own rows, and which keys each chunk of them sees.
        is_checkpointed: the block that runs is computed again in the backward pass.
        block: that runs.
        draws: what ends the random numbers of rows.
    """

    call: Pass
    entry: BlockList
    rows: Rows | None = None
    batch: int = 0
    no_rows: set[str] = field(default_factory=set)
    beside: dict[int, Tensor] = field(default_factory=dict)
    cut_already: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    row_masks: RowMasks | None = None
    masks: dict[int, tuple[Tensor, Tensor, list[Bounds]]] = field(default_factory=dict)
    is_checkpointed: bool = False
    block: nn.Module | None = None
    draws: ExitStack = field(default_factory=ExitStack)

    def end(self) -> None:
        """Forget the sequence when its list of blocks is through."""
        self.rows, self.row_masks = None, None
        self.cut_already, self.masks, self.beside = {}, {}, {}

    def draw_for_rows(self) -> None:
        """Let torch draw other numbers on each rank from now on, for its rows."""
        self.draws.enter_context(drawing_aside("cp", self.call.group.rank()))

    def stop_drawing(self) -> None:
        """Go on with random numbers that the ranks have in common."""
        self.draws.close()

    def whole_dim(self, value: Any) -> int | None:
        """Find the dimension of ``value`` that holds the whole sequence, if it is a stream of one."""
        return None if self.rows is None else self._dim(value, self.rows.length)

    def rows_dim(self, value: Any) -> int | None:
        """Find the dimension of ``value`` that holds this rank's rows."""
        return None if self.rows is None else self._dim(value, self.rows.count)

    def _dim(self, value: Any, count: int) -> int | None:
        """Find the dimension of ``count`` tokens in [batch, count, ...] or [n, batch, count, features]."""
        if not isinstance(value, Tensor) or value.ndim < 3 or not (value.is_floating_point() or value.is_complex()):
            return None
        if value.shape[:2] == (self.batch, count) and not self._is_of_heads(value):
            return 1
        return 2 if value.ndim == 4 and value.shape[1:3] == (self.batch, count) else None

    def _is_of_heads(self, value: Tensor) -> bool:
        """Tell whether ``value`` is scores [batch, heads, queries, seq] of as many heads as some rank has rows."""
        queries = self._rows.count, self._rows.length
        return value.ndim == 4 and value.shape[2] in queries and value.shape[3] == self._rows.length

    def begin(self, value: Tensor) -> None:
        """Decide how the whole ``value``, which enters a block, is cut."""
        at = 2 if value.ndim == 4 and value.shape[1:3] == self.call.shape else 1
        known = value.shape[at - 1 : at + 1] == self.call.shape or (value.ndim == 3 and not self.call.shape)
        self.rows = self.call.divide(value.shape[at]) if known else None
        self.batch = value.shape[at - 1]
        self.cut_already, self.masks = {}, {}
        self.row_masks = self.call.row_masks
        self.call.rows, self.call.batch = self.rows, self.batch

    def note_beside(self, named: list[tuple[str, Any]], begins: bool) -> None:
        """Note what enters a block, by the names of its arguments, that is of another sequence, as an encoder's."""
        if begins:  # and no block has made rows yet
            self.no_rows = {name for name, x in named if isinstance(x, Tensor) and self.whole_dim(x) is None}
        self.beside = {id(value): value for name, value in named if name in self.no_rows}

    def cut(self, value: Any) -> Any:
        """Take this rank's rows of a whole stream; other values stay."""
        dim = self.whole_dim(value)
        return value if dim is None else self._rows.cut(value, dim)

    def join(self, value: Any) -> Any:
        """Gather a stream of rows, whose gradients are parts on every rank; other values stay."""
        is_beside = not torch.compiler.is_compiling() and id(value) in self.beside
        dim = None if is_beside else self.rows_dim(value)
        return value if dim is None else gather_parts(value, dim, self._rows)

    def whole_mask(self, value: Any) -> Any:
        """Join a mask that was built by rows; other values stay."""
        # Where a call leaves out its first block, the stream has not begun.
        masks = self.row_masks or self.call.row_masks
        return value if masks is None else masks.whole(value)

    def prepare_mask(self, mask: Any) -> None:
        """Find what queries of this rank need of ``mask``, outside of what a recomputation runs again.

        Raises:
            ValueError: if it has as many rows as this rank, and was not built by rows.
        """
        if not isinstance(mask, Tensor) or mask.ndim != 4 or mask.shape[-2] == 1 or id(mask) in self.masks:
            return
        if mask.shape[-2] == self._rows.count and (self.row_masks is None or id(mask) not in self.row_masks.built):
            raise ValueError(
                f"context parallelism built {self._rows.count} rows of a mask, and the model changed them before its "
                'blocks, which may have needed all of them; use cp_exchange="all_to_all", which builds whole masks'
            )
        own = self._own_rows(mask)
        self.masks[id(mask)] = mask, own, seen_keys(own, self._rows)

    def own_mask(self, mask: Tensor | None) -> tuple[Tensor | None, list[Bounds] | None]:
        """Take the rows of ``mask`` that belong to this rank's queries, and the keys they see, if those are known."""
        if mask is None or mask.shape[-2] == 1:
            return mask, None
        if torch.compiler.is_compiling() or id(mask) not in self.masks:
            return self._own_rows(mask), None
        return self.masks[id(mask)][1:]

    def _own_rows(self, mask: Tensor) -> Tensor:
        return self._rows.cut(mask, -2) if mask.shape[-2] == self._rows.length else mask

    def chooses_heads(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
        """Tells whether ``module`` exchanges heads and not keys; a mask of rows is enough for keys only.

        Args:
            module: of attention, for messages.
            query: [batch, heads / tp, rows, width].
            key: [batch, kv heads / tp, rows, width].
            value: as ``key``.
            mask: [..., rows or whole sequence, whole sequence]; ``None``: causal, or none.

        Raises:
            ValueError: if ``cp_exchange="all_to_all"`` is asked for and cp does not divide the heads.
        """
        wanted, ranks, name = self.call.exchange, self.call.group.size(), class_names(module)[0]
        if wanted == "gather":
            return False
        if mask is not None and mask.shape[-2] == self._rows.count:
            _tell(f"cp={ranks}: {name} exchanges keys and values (masks are of rows, heads need whole ones)")
            return False
        if reason := why_not(query, ranks):
            if wanted == "all_to_all":
                raise ValueError(
                    f'cp_exchange="all_to_all" splits the heads of a {name} over cp, but {reason}; use "gather" or '
                    '"auto", or another cp'
                )
            return False
        gathered, exchanged = elements_moved(query, key, value, ranks)
        by_heads = wanted == "all_to_all" or exchanged < gathered
        numbers = f"{exchanged:.0f} elements per token move with heads, {gathered:.0f} with keys"
        _tell(f"cp={ranks}: {name} exchanges {'heads' if by_heads else 'keys and values'} ({numbers})")
        return by_heads

    @property
    def _rows(self) -> Rows:
        assert self.rows is not None
        return self.rows


def _tell(choice: str) -> None:
    """Log once what is exchanged, where no graph is compiled."""
    if not torch.compiler.is_compiling():
        log_once(choice)
