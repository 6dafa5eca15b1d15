"""One GPU, one rank: adapters on a base of four bits take the steps of bitsandbytes and peft alone."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import Strategy
from torch import nn

from lightning_automodel import DDPStrategy, FSDP2TPStrategy
from tests.support.training import batches

pytest.importorskip("bitsandbytes")
from tests.support.four_bit import DOUBLE, FIELDS, FourBit, adapt, llama

BOUND = 1e-4  # float32 on CUDA; a matrix product has another order of sums there
STRATEGIES: dict[str, Any] = {"fsdp2": FSDP2TPStrategy, "ddp": DDPStrategy}


def adapt_alike(base: nn.Module) -> nn.Module:
    """Adapters of the same numbers, on whichever device they are built."""
    adapted, generator = adapt(base), torch.Generator("cpu").manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator, device="cpu") * 0.1)
    return adapted


def losses(strategy: Strategy | str, directory: Path) -> list[float]:
    """Those of four steps in float32."""
    module = FourBit(directory, adapt_alike, {**FIELDS, **DOUBLE}, torch.float32)
    trainer = L.Trainer(
        accelerator="cuda",
        devices=1,
        strategy=strategy,
        max_steps=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, batches(1))
    return module.losses


@pytest.mark.parametrize("name", STRATEGIES)
def test_four_bits_on_cuda(name: str, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    expected = losses("auto", tmp_path)
    assert losses(STRATEGIES[name](), tmp_path) == pytest.approx(expected, rel=BOUND)
