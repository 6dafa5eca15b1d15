"""One GPU: a run that is under way waits for the device nowhere, but where transformers looks for packed documents."""

import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import Strategy
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig

from lightning_automodel import DDPStrategy, FSDP2Config, FSDP2TPStrategy
from lightning_automodel.callbacks import Health, Throughput, TQDMStepBar
from lightning_automodel.finetuning import CausalLM
from tests.gpu.test_smoke import SIZES, batches

FROM, BATCHES = 4, 8
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "fsdp2": FSDP2TPStrategy,
    "ddp": DDPStrategy,
    "single documents": lambda: FSDP2TPStrategy(config=FSDP2Config(patch_is_packed_sequence=True)),
}
OF_TRANSFORMERS = "masking_utils.py"


class Watched(Callback):
    """Lets torch warn of every wait for the device, from a batch on."""

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == FROM:
            torch.cuda.set_sync_debug_mode("warn")

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        if args[-1] == BATCHES - 1:
            torch.cuda.set_sync_debug_mode("default")


def waits(path: Path, strategy: str, **options: Any) -> Counter[str]:
    """Count the waits of a run by the files that wait."""
    rows = [{"input_ids": row, "labels": row} for row in batches() * 2]
    trainer = L.Trainer(
        devices=1,
        strategy=STRATEGIES[strategy](),
        max_epochs=1,
        gradient_clip_val=1.0,
        accumulate_grad_batches=2,
        log_every_n_steps=1000,
        callbacks=[Watched(), Throughput(), Health(), TQDMStepBar()],
        enable_checkpointing=False,
        logger=False,
        **options,
    )
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trainer.fit(CausalLM(str(path)), DataLoader(rows, batch_size=2, pin_memory=True))  # type: ignore[arg-type]
    return Counter(Path(w.filename).name for w in found if "synchronizing CUDA operation" in str(w.message))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_step_waits_for_nothing(strategy: str, precision: Any, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).save_pretrained(tmp_path)
    found = waits(tmp_path, strategy, accelerator="gpu", precision=precision)
    assert found.pop(OF_TRANSFORMERS, 0) <= (0 if strategy == "single documents" else BATCHES - FROM)
    assert not found
