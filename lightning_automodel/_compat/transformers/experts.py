"""Private names of transformers, with the reason: the grouped product in which a module of experts meets its weights.

The public seam, a function in ``ALL_EXPERTS_FUNCTIONS``, would have to repeat all around the product: gates,
biases, the order of rows.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations import moe

_GROUPED_LINEAR, _EXPERTS_FORWARD = moe._grouped_linear, moe.grouped_mm_experts_forward
_NAME = "grouped_mm"


@moe.use_experts_implementation
class _Chosen(nn.Module):
    """Has the forward of every class whose config chooses the function that computes its experts."""


_CHOICE = _Chosen.forward.__code__


@dataclass(frozen=True)
class LowRankSum:
    """A weight of stacked experts, ``weight + scale * (first @ second)``, that is never added up.

    Attributes:
        weight: [experts, in, out] if it is transposed, as its module says, else [experts, out, in].
        first: [experts, in, r].
        second: [experts, r, out].
        scale: of the product.
    """

    weight: Tensor
    first: Tensor
    second: Tensor
    scale: float


def replace_grouped_products() -> None:
    """Let grouped products of transformers take a :class:`LowRankSum` for a weight, and add biases to a copy.

    Biases were added to the result of the product in place, which selective checkpointing may have kept.
    """
    moe._grouped_linear = _grouped_linear


def chooses_function(experts: nn.Module) -> bool:
    """Tell whether a call of ``experts`` is nothing but a call of the function that its config names: neither code that
    was assigned to ``forward``, nor that of a subclass.
    """
    return "forward" not in vars(experts) and getattr(type(experts).forward, "__code__", None) is _CHOICE


def runs_grouped_products(experts: nn.Module) -> bool:
    """Tell whether the config of ``experts`` names transformers' own function of grouped products."""
    return (
        getattr(getattr(experts, "config", None), "_experts_implementation", None) == _NAME
        and moe.ALL_EXPERTS_FUNCTIONS.get(_NAME) is _EXPERTS_FORWARD
    )


def run_grouped_products(experts: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """Run grouped products on what stands for a module of experts, of whose parameters some may be a
    :class:`LowRankSum`.
    """
    return _EXPERTS_FORWARD(experts, *args, **kwargs)


def _grouped_linear(
    input: Tensor, weight: Tensor | LowRankSum, offs: Tensor, bias: Tensor | None = None, is_transposed: bool = False
) -> Tensor:
    if isinstance(weight, LowRankSum):
        out = _GROUPED_LINEAR(input, weight.weight, offs, None, is_transposed)
        narrow = _GROUPED_LINEAR(input, weight.first, offs, None, True)
        out = torch.add(out, _GROUPED_LINEAR(narrow, weight.second, offs, None, True), alpha=weight.scale)
    else:
        out = _GROUPED_LINEAR(input, weight, offs, None, is_transposed)
    return out if bias is None else out + bias
