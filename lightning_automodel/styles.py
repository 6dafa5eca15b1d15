"""The tensor-parallel styles: how one planned module or parameter is stored, and which collectives surround it.

A style is data. It says where a parameter is cut (``placement``), whether the gradient of a whole parameter is a
partial sum (``partial``), and what happens to the values on the way in (``enter``) and out (``leave``)::

                 enter             local matmul             leave
    whole x  --> COPY  ----------> x @ W[rows of rank] ----------------> a slice of the features   (colwise)
    slice x  --------------------> x @ W[cols of rank] ----> REDUCE ---> whole                     (rowwise)

The names are those of the plans that transformers publishes (``model.tp_plan``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement


class Enter(Enum):
    """What happens to the first tensor argument of a planned module."""

    NONE = auto()
    COPY = auto()
    """whole, and its gradient is summed over tp"""
    SPLIT = auto()
    """whole, cut on its last dimension"""
    EMBED = auto()
    """token ids, shifted to the rank's rows of the embedding"""


class Leave(Enum):
    """What happens to the first output of a planned module."""

    NONE = auto()
    REDUCE = auto()
    """partial sums, summed over tp"""
    GATHER = auto()
    """slices of the last dimension, joined"""


@dataclass(frozen=True, kw_only=True)
class Style:
    """How one module or parameter of a plan is split over the tp axis.

    Attributes:
        name: as plans spell it.
        placement: ``(parameter name, number of dims) -> placement`` on the tp axis.
        partial: a parameter that stays whole sees a slice of the work, so its gradient is a partial sum.
        enter: collective on the way in, when the module is not inside a boundary.
        leave: collective on the way out, when the module is not inside a boundary.
    """

    name: str
    placement: Callable[[str, int], Placement]
    partial: bool = False
    enter: Enter = Enter.NONE
    leave: Leave = Leave.NONE

    @property
    def is_column(self) -> bool:
        """Cuts the output features: opens a split region."""
        return self.enter is Enter.COPY and self.leave is Leave.NONE

    @property
    def is_row(self) -> bool:
        """Cuts the input features: closes a split region."""
        return self.leave is Leave.REDUCE and self.enter is not Enter.EMBED


def _rows(name: str, ndim: int) -> Placement:
    """Output features: dim 0 of a matrix or a bias, the last but one of stacked matrices."""
    return Shard(max(ndim - 2, 0))


def _columns(name: str, ndim: int) -> Placement:
    """Input features; a bias belongs to the sum and stays whole."""
    return Replicate() if name == "bias" else Shard(ndim - 1)


def _vocabulary(name: str, ndim: int) -> Placement:
    return Shard(0)


def _whole(name: str, ndim: int) -> Placement:
    return Replicate()


STYLES: dict[str, Style] = {
    style.name: style
    for style in (
        Style(name="colwise", placement=_rows, enter=Enter.COPY),
        Style(name="colwise_gather_output", placement=_rows, enter=Enter.COPY, leave=Leave.GATHER),
        Style(name="rowwise", placement=_columns, leave=Leave.REDUCE),
        Style(name="rowwise_split_input", placement=_columns, enter=Enter.SPLIT, leave=Leave.REDUCE),
        Style(name="embedding_rowwise", placement=_vocabulary, enter=Enter.EMBED, leave=Leave.REDUCE),
        Style(name="replicated_with_grad_allreduce", placement=_whole, partial=True),
        Style(name="replicate", placement=_whole),
    )
}


def style_of(name: str, rule: str) -> Style:
    """The style that a plan's rule names.

    Raises:
        ValueError: for a name that is not known, with the rule that holds it.
    """
    if name not in STYLES:
        raise ValueError(
            f"the tensor-parallel plan gives {rule!r} the style {name!r}, which is not supported; "
            f"use one of {', '.join(STYLES)}, or tp=1"
        )
    return STYLES[name]
