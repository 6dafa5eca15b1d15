"""Finds what would make the host wait for a CUDA device, on tensors without memory that say they are on one."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_automodel._compat.fake.cuda import told_to_autograd, without_cuda
from lightning_automodel._compat.torch.pytree import tree_leaves


@contextmanager
def played_cuda() -> Generator[None, None, None]:
    """Tensors have no memory within this context; reading a number of one is an error by itself."""
    with FakeTensorMode(), without_cuda(), told_to_autograd():
        yield


class Moves(TorchDispatchMode):
    """Notes operations on tensors of two devices: torch copies the one on the host first, and waits."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, FakeTensor)]
        if len({tensor.fake_device.type for tensor in tensors}) > 1:
            self.found.add(str(func))
        return result
