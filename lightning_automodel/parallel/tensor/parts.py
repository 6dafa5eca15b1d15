"""What a rank has of a value that a split layer gives beside its sum: all of it, or a part, as of the heads.

::

    attention 0 --> position_bias [1, heads / tp, queries, keys] --> attention 1

Other split layers compute with a part as it is. Where they run whole, in a trial or for their draws, it is made whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_automodel._compat.fsdp2.hooks import HANDS_ON, edges_behind
from lightning_automodel.distributed.collectives import gather

_DIM = "_dim_of_which_a_rank_has_a_part"


@dataclass(frozen=True)
class Beside:
    """What a rank has of one value beside the first output of a split layer.

    Attributes:
        is_whole: what one process has.
        dim: of which it has its part; ``None`` where that is not known.
    """

    is_whole: bool
    dim: int | None = None


def cut_dim(part: Sequence[int], whole: Sequence[int], ranks: int) -> int | None:
    """Find the dimension in which ``whole`` is ``ranks`` times as large as ``part``, if this is all that differs."""
    if len(part) != len(whole):
        return None
    differing = [dim for dim, (x, y) in enumerate(zip(part, whole, strict=True)) if x != y]
    return differing[0] if len(differing) == 1 and part[differing[0]] * ranks == whole[differing[0]] else None


def mark_part(value: Tensor, dim: int) -> Tensor:
    """Note that a rank has its part of the dimension ``dim`` in ``value``, and in what FSDP2 makes of it."""
    setattr(value, _DIM, dim)
    node: Any = value.grad_fn
    if node is not None:
        node.metadata[_DIM] = dim
    return value


def dim_of_part(value: Tensor) -> int | None:
    """Return the dimension of which a rank has its part in ``value``; ``None`` for others, and if that is not known."""
    if hasattr(value, _DIM):
        return getattr(value, _DIM)
    node: Any = value.grad_fn
    output = value.output_nr
    while node is not None and node.name() in HANDS_ON:
        node, output = next(iter(edges_behind(node, output)), (None, 0))
    return node.metadata.get(_DIM) if node is not None else None


def whole_of(value: Tensor, group: ProcessGroup) -> Tensor:
    """Join the parts of the ranks, without gradients; others are what they are."""
    dim = dim_of_part(value)
    if dim is None:
        return value.detach()
    with torch.no_grad():
        return gather(value.detach(), dim, value.shape[dim] * group.size(), group)
