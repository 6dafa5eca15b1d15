"""No operation of losses and clipping moves a number between host and device: each would wait for the device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_automodel._compat.fake_cuda import told_to_autograd, without_cuda
from lightning_automodel._compat.pytree import tree_leaves
from lightning_automodel.chunked_loss import chunked_linear_cross_entropy
from lightning_automodel.gradients import clip_grad_norm_
from lightning_automodel.loss import cross_entropy, entropy

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
LOSSES: dict[str, Loss] = {
    "whole": lambda hidden, weight, labels: cross_entropy(linear(hidden, weight), labels),
    "smoothed": lambda hidden, weight, labels: cross_entropy(linear(hidden, weight), labels, label_smoothing=0.1),
    "entropy": lambda hidden, weight, labels: entropy(linear(hidden, weight)).mean(),
    "chunked": lambda hidden, weight, labels: chunked_linear_cross_entropy(hidden, weight, labels, chunk_size=128),
}


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


@pytest.mark.parametrize("name", LOSSES)
def test_nothing_waits_for_the_device(name: str) -> None:
    with FakeTensorMode(), without_cuda(), told_to_autograd():
        hidden, weight = (torch.randn(n, 64, device="cuda", requires_grad=True) for n in (300, 1000))
        labels = torch.randint(1000, (300,), device="cuda")
        with Moves() as moves:  # reading a number of a fake tensor is an error by itself
            LOSSES[name](hidden, weight, labels).backward()
            clip_grad_norm_([hidden, weight], 1.0)
    assert not moves.found
