"""No operation of losses and clipping moves a number between host and device: each would wait for the device."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from lightning_automodel.chunked_loss import chunked_linear_cross_entropy
from lightning_automodel.gradients import clip_grad_norm_
from lightning_automodel.loss import cross_entropy, entropy
from lightning_automodel.loss.model_losses import causal_lm_loss
from tests.support.waiting import Moves, played_cuda

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
LOSSES: dict[str, Loss] = {
    "whole": lambda hidden, weight, labels: cross_entropy(linear(hidden, weight), labels),
    "smoothed": lambda hidden, weight, labels: cross_entropy(linear(hidden, weight), labels, label_smoothing=0.1),
    "counted": lambda hidden, weight, labels: causal_lm_loss(
        linear(hidden, weight), labels, 1000, num_items_in_batch=9
    ),
    "entropy": lambda hidden, weight, labels: entropy(linear(hidden, weight)).mean(),
    "chunked": lambda hidden, weight, labels: chunked_linear_cross_entropy(hidden, weight, labels, chunk_size=128),
}


@pytest.mark.parametrize("name", LOSSES)
def test_nothing_waits_for_the_device(name: str) -> None:
    with played_cuda():
        hidden, weight = (torch.randn(n, 64, device="cuda", requires_grad=True) for n in (300, 1000))
        labels = torch.randint(1000, (300,), device="cuda")
        with Moves() as moves:
            LOSSES[name](hidden, weight, labels).backward()
            clip_grad_norm_([hidden, weight], 1.0)
    assert not moves.found
