"""What a user's code computes with in the place of a DTensor that each rank holds whole."""

from typing import Any, Self

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_automodel._compat.torch.tensors import is_in_backward
from lightning_automodel.distributed.shards import local_tensor

_OF_TENSORS: Any = Tensor  # its attributes, beneath those of a subclass


class Plain(nn.Parameter):
    """The memory of a DTensor as a plain tensor: gradient, data and flag are the DTensor's, to read and to write."""

    stored: Any = None
    version = 0  # of it, that autograd has seen

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        memo[id(self)] = copy = nn.Parameter(self.detach().clone(), self.requires_grad)
        return copy

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)

    @property
    def own_gradient(self) -> Tensor | None:
        """Return what the running backward pass has given on this rank."""
        return _OF_TENSORS.grad.__get__(self)

    def forget(self) -> None:
        """Drop it."""
        _OF_TENSORS.grad.__set__(self, None)

    def _laid(self, value: Tensor) -> Tensor:
        return DTensor.from_local(value, self.stored.device_mesh, self.stored.placements, run_check=False)

    @property
    def grad(self) -> Tensor | None:
        """Return the DTensor's; within a backward pass, which adds to it, what that has given."""
        if is_in_backward():
            return self.own_gradient
        return None if self.stored.grad is None else local_tensor(self.stored.grad)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.stored.grad = None if value is None else self._laid(value)

    @property
    def data(self) -> Tensor:
        """Return the memory that both have."""
        return _OF_TENSORS.data.__get__(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        _OF_TENSORS.data.__set__(self, value)
        self.stored.data = self._laid(_OF_TENSORS.data.__get__(self))

    @property
    def requires_grad(self) -> bool:
        """Tell whether the DTensor trains."""
        return _OF_TENSORS.requires_grad.__get__(self) if self.stored is None else self.stored.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    @override
    def requires_grad_(self, requires_grad: bool = True) -> Self:
        self.stored.requires_grad_(requires_grad)
        return self.follow(requires_grad)

    def follow(self, requires_grad: bool) -> Self:
        """Let autograd compute gradients, or not; what the DTensor says of itself stays."""
        super().requires_grad_(requires_grad)
        return self
