"""Lets hooks of users compute with tensors of a checkpoint folder that have not been read."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_automodel._compat.pytree import tree_map_only

_OPERATORS = ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "matmul", "neg", "getitem")


class ReadWhenUsed:
    """Mixin: what is computed with it is computed with the whole tensor, on the CPU of each rank that does."""

    @abstractmethod
    def load(self) -> Tensor:
        """Read the whole tensor."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        if name.endswith("_"):
            raise AttributeError(
                f"{name}: a tensor of a checkpoint folder is read where it is needed, and what is written into it here "
                "would be lost; change tensor.load(), and put the result in its place in the checkpoint"
            )
        return getattr(self.load(), name)

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        loaded = tree_map_only(ReadWhenUsed, lambda stored: stored.load(), (args, kwargs or {}))
        return func(*loaded[0], **loaded[1])


def _operator(name: str) -> Callable[..., Any]:
    def operate(self: ReadWhenUsed, *others: Any) -> Any:
        loaded = (other.load() if isinstance(other, ReadWhenUsed) else other for other in others)
        return getattr(self.load(), name)(*loaded)

    return operate


for _name in _OPERATORS:
    setattr(ReadWhenUsed, f"__{_name}__", _operator(f"__{_name}__"))
