"""Makes numbers that hooks compute from gradients whole where they meet: Lightning's ``grad_norm``, for example."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode


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


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value
