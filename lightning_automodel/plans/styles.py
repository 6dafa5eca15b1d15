"""The tensor-parallel styles: how one planned module or parameter is stored, and which collectives surround it.

A style is data. It says where a parameter is cut (``placement``), whether the gradient of a whole parameter is a
partial sum (``partial``), and what happens to the values on the way in (``enter``) and out (``leave``)::

                 enter             local matmul             leave
    whole x  --> COPY  ----------> x @ W[rows of rank] ----------------> a slice of the features   (colwise)
    slice x  --------------------> x @ W[cols of rank] ----> REDUCE ---> whole                     (rowwise)

The names are those of the plans that transformers publishes (``model.tp_plan``), and a few for other libraries' models.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, auto

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from lightning_automodel._compat.dtensor.tensors import StridedShard, strided_shard


class Enter(Enum):
    """What happens to the first tensor argument of a planned module."""

    NONE = auto()
    COPY = auto()
    """whole; its gradients are summed over tp"""
    COPY_ALL = auto()
    """the same for every floating-point argument"""
    SPLIT = auto()
    """whole; cut on its last dimension"""
    DIVIDE = auto()
    """whole, and what comes out is summed over tp although every rank has all of it: its share"""
    EMBED = auto()
    """token ids; shifted to the rank's rows of the embedding"""
    NORM = auto()
    """slices of features that are normalized together; their squares are summed over tp"""
    ROW_NORM = auto()
    """no value enters: the module (DoRA's) takes the norms of the rows of a matrix of which a rank has columns"""


class Leave(Enum):
    """What happens to the first output of a planned module."""

    NONE = auto()
    REDUCE = auto()
    """partial sums; summed over tp"""
    REDUCE_SPLIT = auto()
    """partial sums; summed over tp, then cut on the last dimension"""
    REDUCE_ALL = auto()
    """partial sums, and so are all other outputs"""
    GATHER = auto()
    """slices of the last dimension; joined"""
    COPY_ROTARY = auto()
    """whole; the rotary part of the last dimension goes straight into split heads, so its gradients are summed"""
    SPLIT_ROTARY = auto()
    """cosines and sines, whole; cut on the heads: [batch, heads, seq, x], or [batch, seq, heads * x]"""


@dataclass(frozen=True, kw_only=True)
class Style:
    """How one module or parameter of a plan is split over the tp axis.

    Attributes:
        name: as plans spell it.
        placement: ``(parameter name, number of dims) -> placement`` on the tp axis.
        partial: a parameter that stays whole sees a slice of the work, so its gradient is a partial sum.
        enter: collective on the way in.
        leave: collective on the way out.
        opens: inside of a boundary, it turns whole values into split ones.
        closes: inside of a boundary, it turns split values into partial sums.
        confined: it can do without its collectives inside of a boundary.
        divides: the module counts heads (``modules/heads.py``), of which a rank has its share. Where the module's own
            code reads such an attribute, this is found without a rule.
    """

    name: str
    placement: Callable[[str, int], Placement]
    partial: bool = False
    enter: Enter = Enter.NONE
    leave: Leave = Leave.NONE
    opens: bool = False
    closes: bool = False
    confined: bool = True
    divides: bool = False

    @property
    def joins(self) -> bool:
        """Tell whether it stores a part of a matrix whose module takes and gives all features."""
        return self.enter is Enter.SPLIT or (self.enter is Enter.COPY and self.leave is Leave.GATHER)


def _rows(name: str, ndim: int) -> Placement:
    """Places output features: dim 0 of a matrix, the last but one of stacked matrices, the last of biases."""
    return Shard(_dim_of_rows(name, ndim))


def _columns(name: str, ndim: int) -> Placement:
    """Places input features; a bias belongs to the sum and stays whole."""
    return Replicate() if name.endswith("bias") else Shard(ndim - 1)


def _turned_rows(name: str, ndim: int) -> Placement:
    """Places output features of stacked matrices [..., in, out]; of biases, too."""
    return Shard(ndim - 1)


def _turned_columns(name: str, ndim: int) -> Placement:
    """Places input features of stacked matrices [..., in, out]."""
    return Replicate() if name.endswith("bias") else Shard(ndim - 2)


def _packed_rows(matrices: int) -> Callable[[str, int], Placement]:
    """Places matrices one above the other (gate and up; query, key and value): a shard of each."""
    return lambda name, ndim: strided_shard(_dim_of_rows(name, ndim), matrices)


def _packed_columns(name: str, ndim: int) -> Placement:
    """Places two matrices side by side: a shard of each."""
    return Replicate() if name.endswith("bias") else strided_shard(ndim - 1, 2)


def _dim_of_rows(name: str, ndim: int) -> int:
    return ndim - 1 if name.endswith("bias") else max(ndim - 2, 0)


def _dim(dim: int) -> Callable[[str, int], Placement]:
    return lambda name, ndim: Shard(dim)


def _table(dim: int) -> Callable[[str, int], Placement]:
    """Places an embedding's table; other parameters beside it are about all tokens."""
    return lambda name, ndim: Shard(dim) if name == "weight" else Replicate()


def _whole(name: str, ndim: int) -> Placement:
    return Replicate()


TURNED = ("turned_colwise", "turned_rowwise")
"""Styles of parameters that hold stacked matrices [..., in, out]."""

EMBEDDINGS = ("embedding_rowwise", "embedding_colwise", "embedding_of_heads")
"""Styles of modules that look rows up."""

_GATHERED = Style(name="colwise_gather_output", placement=_rows, enter=Enter.COPY, leave=Leave.GATHER, confined=False)
_SPLIT = Style(name="rowwise_split_input", placement=_columns, enter=Enter.SPLIT, leave=Leave.REDUCE, confined=False)

STYLES: dict[str, Style] = {
    style.name: style
    for style in (
        Style(name="colwise", placement=_rows, enter=Enter.COPY, opens=True),
        Style(name="interleaved_colwise", placement=_rows, enter=Enter.COPY, opens=True),
        _GATHERED,
        replace(_GATHERED, name="colwise_rep"),
        Style(name="packed_colwise", placement=_packed_rows(2), enter=Enter.COPY, opens=True),
        Style(name="packed_qkv_colwise", placement=_packed_rows(3), enter=Enter.COPY, opens=True),
        Style(name="rowwise", placement=_columns, leave=Leave.REDUCE, closes=True),
        _SPLIT,
        replace(_SPLIT, name="rowwise_rep"),
        Style(name="rowwise_split_output", placement=_columns, leave=Leave.REDUCE_SPLIT, confined=False),
        Style(name="turned_colwise", placement=_turned_rows, enter=Enter.COPY, opens=True),
        Style(name="turned_rowwise", placement=_turned_columns, leave=Leave.REDUCE, closes=True),
        Style(name="packed_rowwise", placement=_packed_columns, opens=True),
        Style(name="embedding_rowwise", placement=_table(0), enter=Enter.EMBED, leave=Leave.REDUCE, confined=False),
        Style(name="embedding_colwise", placement=_table(1), leave=Leave.GATHER, confined=False),
        Style(name="embedding_of_heads", placement=_table(1), opens=True),
        Style(name="moe_tp_experts", placement=_whole, enter=Enter.COPY_ALL, leave=Leave.REDUCE, opens=True),
        Style(name="ep_dispatch_experts", placement=_whole, enter=Enter.COPY_ALL, leave=Leave.REDUCE, opens=True),
        Style(name="grouped_gemm", placement=_dim(0), opens=True, closes=True),
        Style(name="moe_identity_expert", placement=_whole, enter=Enter.DIVIDE),
        Style(name="all_reduce", placement=_whole, enter=Enter.COPY_ALL, leave=Leave.REDUCE),
        Style(name="mla_kv_a_proj", placement=_whole, leave=Leave.COPY_ROTARY),
        Style(name="replicated_with_grad_allreduce", placement=_whole, partial=True),
        Style(name="norm_across_heads", placement=_dim(0), enter=Enter.NORM),
        Style(name="split_heads", placement=_whole, divides=True),
        Style(name="split_heads_all_outputs", placement=_whole, leave=Leave.REDUCE_ALL, divides=True),
        Style(name="split_rotary", placement=_whole, leave=Leave.SPLIT_ROTARY),
        Style(name="separate", placement=_whole, confined=False),
        Style(name="local_params", placement=_whole),
        Style(name="replicate", placement=_whole),
    )
}


def style_of(name: str, rule: str) -> Style:
    """Finds the style that a plan's rule names.

    Raises:
        ValueError: for a name that is not known, with the rule that holds it.
    """
    if name not in STYLES:
        raise ValueError(
            f"the tensor-parallel plan gives {rule!r} the style {name!r}, which is not supported; "
            f"use one of {', '.join(STYLES)}, or tp=1"
        )
    return STYLES[name]


def turned(style: Style) -> Style:
    """Return ``style`` for a layer that stores its matrix as [in, out]."""

    def placement(name: str, ndim: int) -> Placement:
        found = style.placement(name, ndim)
        if ndim != 2 or not isinstance(found, Shard | StridedShard):
            return found
        dim = 1 - found.dim
        return strided_shard(dim, int(found.split_factor)) if isinstance(found, StridedShard) else Shard(dim)

    return replace(style, placement=placement)
