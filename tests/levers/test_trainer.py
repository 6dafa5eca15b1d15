"""The levers under a Trainer: a model with a layer beside it, which has no blocks to work on."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_automodel.config import FSDP2Config
from tests.harness.pool import Pool, RankFailed
from tests.strategies.modules import TinyModule, loader, trainer

LEVERS: dict[str, Any] = {"activation_checkpointing": "full"}


class WithLayer(TinyModule):
    """The loss goes through a layer beside the model."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(1, 1)
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.scale(self.loss(batch)[None])[0]
        self.losses.append(loss.item())
        return loss


class LayerOnly(TinyModule):
    def configure_model(self) -> None:
        self.model = nn.Linear(6, 1)


def losses(levers: dict[str, Any], kind: type[TinyModule] = WithLayer, tp: int = 2) -> list[float]:
    """Runs on each rank."""
    torch.manual_seed(0)
    module: Any = kind()
    trainer(2, {"tp": tp, "config": FSDP2Config(**levers)}, precision="bf16-mixed").fit(module, loader(3))
    return module.losses


def test_same_losses(pool2: Pool) -> None:
    assert pool2.run(losses, LEVERS, trainer=True) == pool2.run(losses, {}, trainer=True)


def test_a_module_without_blocks(pool2: Pool) -> None:
    with pytest.raises(RankFailed, match="activation_checkpointing: the LightningModule holds no repeated blocks"):
        pool2.run(losses, LEVERS, LayerOnly, 1, trainer=True)
