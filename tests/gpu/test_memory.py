"""One GPU: the peak of a step under the Trainer, which holds no gradients of the step before in its forward pass."""

import pytest
import torch

from lightning_automodel import DDPStrategy, FSDP2TPStrategy
from lightning_automodel.testing.pool import Nursery, Pool
from tests.support.wide import LAYERS, Holding, Wide, fit_wide, loop_by_hand

WIDTH = 2048
GRADIENTS = LAYERS * WIDTH**2 * 4


@pytest.fixture(scope="module")
def pool1(nursery: Nursery) -> Pool:
    return Pool(nursery, 1)


def peak(module: type[Wide], strategy: type) -> int:
    """Runs on a rank of its own, whose first kernels take their workspace: bytes."""
    fit_wide(module(WIDTH), WIDTH, strategy(), "gpu")
    return torch.cuda.max_memory_allocated()


def peak_by_hand() -> int:
    """Runs on a rank of its own too."""
    loop_by_hand(WIDTH, "cuda")
    return torch.cuda.max_memory_allocated()


def test_gradients_of_the_step_before_are_not_held(pool1: Pool) -> None:
    [held], [freed] = (pool1.run(peak, module, FSDP2TPStrategy, trainer=True) for module in (Holding, Wide))
    assert held - freed > GRADIENTS / 2


@pytest.mark.parametrize("strategy", [FSDP2TPStrategy, DDPStrategy])
def test_a_step_takes_what_a_loop_by_hand_takes(strategy: type, pool1: Pool) -> None:
    [loop], [found] = pool1.run(peak_by_hand, trainer=True), pool1.run(peak, Wide, strategy, trainer=True)
    assert found < 1.1 * loop + GRADIENTS * (strategy is DDPStrategy)  # buckets stay
