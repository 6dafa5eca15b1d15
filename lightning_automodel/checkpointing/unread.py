"""Lets hooks of users compute with tensors of a checkpoint folder that have not been read."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_automodel._compat.torch.pytree import tree_map_only


def _operator(name: str) -> Callable[..., Any]:
    def operate(self: "ReadWhenUsed", *others: Any) -> Any:
        loaded = (other.load() if isinstance(other, ReadWhenUsed) else other for other in others)
        return getattr(self.load(), name)(*loaded)

    return operate


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

    __add__ = _operator("__add__")
    __radd__ = _operator("__radd__")
    __sub__ = _operator("__sub__")
    __rsub__ = _operator("__rsub__")
    __mul__ = _operator("__mul__")
    __rmul__ = _operator("__rmul__")
    __truediv__ = _operator("__truediv__")
    __rtruediv__ = _operator("__rtruediv__")
    __floordiv__ = _operator("__floordiv__")
    __mod__ = _operator("__mod__")
    __pow__ = _operator("__pow__")
    __rpow__ = _operator("__rpow__")
    __matmul__ = _operator("__matmul__")
    __neg__ = _operator("__neg__")
    __abs__ = _operator("__abs__")
    __getitem__ = _operator("__getitem__")
    __lt__ = _operator("__lt__")
    __le__ = _operator("__le__")
    __gt__ = _operator("__gt__")
    __ge__ = _operator("__ge__")
    __int__ = _operator("__int__")
    __float__ = _operator("__float__")
    __bool__ = _operator("__bool__")
    __index__ = _operator("__index__")
