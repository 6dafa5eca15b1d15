"""A module whose steps peak by what they hold: as many bytes of activations as of gradients, in each of many layers."""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.support.training import make_trainer

LAYERS, STEPS = 16, 4


class Wide(L.LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Holding(Wide):
    """Clears its gradients itself, so that they stay until then."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad()


def fit_wide(module: Wide, width: int, strategy: Strategy, accelerator: str = "cpu") -> None:
    """Takes steps of ``width`` rows under the Trainer."""
    batches: Any = DataLoader([torch.ones(width, width)] * STEPS, batch_size=None)
    make_trainer(strategy, accelerator=accelerator, max_steps=STEPS).fit(module, batches)


def loop_by_hand(width: int, device: str = "cpu") -> None:
    """Takes the same steps without the Trainer."""
    module = Wide(width).to(device)
    optimizer, batch = module.configure_optimizers(), torch.ones(width, width, device=device)
    for _ in range(STEPS):
        module.training_step(batch, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
