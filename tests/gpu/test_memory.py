"""One GPU: the peak of a step under the Trainer, which holds no gradients of the step before in its forward pass."""

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_automodel import DDPStrategy, FSDP2TPStrategy
from lightning_automodel.testing.pool import Nursery, Pool

LAYERS, WIDTH, ROWS = 16, 2048, 2048
"""As many bytes of activations as of gradients: the peak is behind the forward pass, or in the middle of backward."""


class Wide(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Holding(Wide):
    """Clears them itself, so that they stay until then."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad()


def peak(module: type[Wide], strategy: type) -> int:
    """Runs on a rank of its own, whose first kernels take their workspace: bytes."""
    trainer = L.Trainer(
        accelerator="gpu",
        devices=1,
        strategy=strategy(),
        max_steps=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module(), DataLoader(torch.ones(4 * ROWS, WIDTH), batch_size=ROWS))
    return torch.cuda.max_memory_allocated()


def peak_by_hand() -> int:
    """Runs on a rank of its own too."""
    module = Wide().cuda()
    optimizer, batch = module.configure_optimizers(), torch.ones(ROWS, WIDTH, device="cuda")
    for _ in range(4):
        module.training_step(batch, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cuda.max_memory_allocated()


@pytest.fixture(scope="module")
def pool1(nursery: Nursery) -> Pool:
    return Pool(nursery, 1)


def test_gradients_of_the_step_before_are_not_held(pool1: Pool) -> None:
    gradients = LAYERS * WIDTH**2 * 4
    [held], [freed] = (pool1.run(peak, module, FSDP2TPStrategy, trainer=True) for module in (Holding, Wide))
    assert held - freed > gradients / 2


@pytest.mark.parametrize("strategy", [FSDP2TPStrategy, DDPStrategy])
def test_a_step_takes_what_a_loop_by_hand_takes(strategy: type, pool1: Pool) -> None:
    [loop], [found] = pool1.run(peak_by_hand, trainer=True), pool1.run(peak, Wide, strategy, trainer=True)
    assert found < 1.1 * loop + LAYERS * WIDTH**2 * 4 * (strategy is DDPStrategy)  # buckets stay
