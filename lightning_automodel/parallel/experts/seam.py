"""Where tokens meet their experts: the call of a module of experts, whose rows a graph cannot count."""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor, nn

_IS_SEAM = "_chooses_rows_for_its_experts"


def mark_as_seam(module: nn.Module) -> None:
    """Note that ``module`` chooses the rows that its experts compute, by their values."""
    vars(module)[_IS_SEAM] = True


def holds_seam(module: nn.Module) -> bool:
    """Tell whether ``module`` or a module in it chooses rows by their values."""
    return any(_IS_SEAM in vars(part) for part in module.modules())


def is_seam(module: nn.Module) -> bool:
    """Tell whether ``module`` itself does."""
    return _IS_SEAM in vars(module)


def routed(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Read hidden states, indices and weights off a call of a module of experts, however they are passed."""
    names = _names_of_inputs(type(module).forward)
    given = dict(zip(names, args, strict=False)) | kwargs
    hidden, index, weights = (given[name] for name in names)
    return hidden, index, weights


@cache
def _names_of_inputs(forward: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(forward).parameters)[1:]
