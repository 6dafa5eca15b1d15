"""Knows how many floating-point operations a product needs: torch's formulas, and one that torch lacks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from lightning_automodel._compat.fake.ranks import packet_of
from lightning_automodel._compat.torch.tensors import GROUPED_MM


def formula_of(operation: Any) -> Callable[..., int] | None:
    """Return what counts the operations of ``operation`` from its arguments and ``out_val``; ``None``: it has none."""
    if operation is GROUPED_MM:
        return _grouped
    formula = flop_registry.get(packet_of(operation))
    return None if formula is None else partial(_without_dtypes, formula)


def _without_dtypes(formula: Callable[..., int], *args: Any, **kwargs: Any) -> int:
    """Count by a formula of torch's, some of which take no dtype of what comes out (``addmm``)."""
    return formula(*(value for value in args if not isinstance(value, torch.dtype)), **kwargs)


def _grouped(left: Tensor, right: Tensor, *_: Any, out_val: Any = None, **__: Any) -> int:
    """Count a product of several matrices; where one has two dims, groups are parts of a dim of it."""
    groups = left.shape[0] if left.ndim == right.ndim == 3 else 1
    return 2 * groups * left.shape[-2] * left.shape[-1] * right.shape[-1]
