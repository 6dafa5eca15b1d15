"""The levers under a Trainer: a model with a layer beside it, which has no blocks to work on."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_automodel import DDPStrategy
from lightning_automodel.config import DDPConfig, FSDP2Config
from lightning_automodel.testing.pool import Pool, RankFailed
from tests.strategies.modules import TinyModule, loader, trainer
from tests.support.marks import with_long

LEVERS: dict[str, Any] = {
    "activation_checkpointing": "full",
    "enable_compile": True,
    "compile_backend": "aot_eager",
}


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
    """Runs on each rank; ``tp=0``: replicas."""
    torch.manual_seed(0)
    module: Any = kind()
    strategy = {"tp": tp, "config": FSDP2Config(**levers)} if tp else DDPStrategy(DDPConfig(**levers))
    trainer(2, strategy, precision="bf16-mixed").fit(module, loader(4))
    return module.losses


@pytest.mark.slow
@pytest.mark.parametrize("tp", with_long([2, 0], 0))
def test_same_losses(tp: int, pool2: Pool) -> None:
    found, expected = (pool2.run(losses, levers, tp=tp, trainer=True) for levers in (LEVERS, {}))
    assert len(found[0]) >= 2
    assert found == expected


def test_a_module_without_blocks(pool2: Pool) -> None:
    with pytest.raises(RankFailed, match="enable_compile: the LightningModule holds no repeated blocks"):
        pool2.run(losses, LEVERS, LayerOnly, 1, trainer=True)
