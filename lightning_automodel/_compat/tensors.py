"""Private names of torch's tensors and operations."""

from typing import Any, TypeVar

import torch
from torch import Tensor

GROUPED_MM = torch.ops.aten._grouped_mm.default
"""The product of several matrices at a time, which ``torch.nn.functional.grouped_mm`` runs."""

_Wrapper = TypeVar("_Wrapper", bound=Tensor)


def wrapper_tensor(kind: type[_Wrapper], shape: Any, **options: Any) -> _Wrapper:
    """Makes a tensor of a class of our own that has a shape and no memory; documented, under a private name."""
    return Tensor._make_wrapper_subclass(kind, shape, **options)


def each_norm(tensors: list[Tensor], order: float, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Computes the norm of each tensor, in one kernel where there is one; torch's own clipping does so."""
    return list(torch._foreach_norm(tensors, order, dtype=dtype))


def multiply_(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiplies each tensor in place by a scalar tensor, in one kernel where there is one."""
    torch._foreach_mul_(tensors, factor)


def name_of_operation(operation: Any) -> str:
    """Returns the name of an operation in torch's schemas, such as ``aten::normal_``."""
    return operation._schema.name
