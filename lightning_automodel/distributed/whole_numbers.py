"""Makes numbers that hooks compute from gradients whole where they meet: Lightning's ``grad_norm``, for example."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from lightning_automodel._compat.torch.tensors import EACH_NORM

_NORMS = (Tensor.norm, torch.norm, torch.linalg.vector_norm)
_ORDERS = {"inf": torch.inf, "fro": 2.0, None: 2.0}


@contextmanager
def whole_numbers() -> Generator[None, None, None]:
    """Let ``torch.tensor([...])`` take single numbers of DTensors, within this context; torch does not look into lists
    for them. Collective where there are some.
    """
    with _WholeNumbers():
        yield


class _WholeNumbers(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.tensor and args and isinstance(args[0], list | tuple):
            args = ([_whole(x) for x in args[0]], *args[1:])
        return func(*args, **(kwargs or {}))


@contextmanager
def norms_by(compute: Callable[[Tensor, float], Tensor | None]) -> Generator[None, None, None]:
    """Let torch's norms of a whole tensor be what ``compute(tensor, order)`` returns, unless that is ``None``."""
    with _NormsBy(compute):
        yield


class _NormsBy(TorchFunctionMode):
    def __init__(self, compute: Callable[[Tensor, float], Tensor | None]) -> None:
        super().__init__()
        self.compute = compute

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if (func in _NORMS or func is EACH_NORM) and len(args) <= 2 and _is_whole_norm(kwargs):
            order = args[1] if len(args) == 2 else kwargs.get("p", kwargs.get("ord", 2.0))
            tensors = args[0] if func is EACH_NORM else [args[0]]
            found = [self._norm(tensor, _ORDERS.get(order, order)) for tensor in tensors]
            if all(norm is not None for norm in found):
                return found if func is EACH_NORM else found[0]
        return func(*args, **kwargs)

    def _norm(self, tensor: Tensor, order: float) -> Tensor | None:
        return self.compute(tensor, order) if isinstance(tensor, DTensor) else None


def _is_whole_norm(kwargs: dict[str, Any]) -> bool:
    return not any(value for name, value in kwargs.items() if name not in ("p", "ord"))  # no dim, no dtype


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value
