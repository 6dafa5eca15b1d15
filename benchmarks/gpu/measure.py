"""One row of the ladder, in a process of its own: `python -m benchmarks.gpu.measure ROW`, JSON in and out."""

import json
import sys
import time
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from benchmarks.gpu.rows import Row
from lightning_automodel import FSDP2Config, FSDP2TPStrategy
from lightning_automodel.planner.flops import count_model

WARM, STEPS = 3, 8
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def build(row: Row, smoke: bool) -> nn.Module:
    """Build the model, with its adapters, where it is called for: on the meta device in ``configure_model``."""
    config = row.config(smoke)
    if row.experts is not None:
        config._experts_implementation = row.experts
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if not row.lora:
        return model
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))  # type: ignore[return-value]


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW over what trains, in one kernel."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5, fused=DEVICE == "cuda")


class Module(L.LightningModule):
    """Notes when steps begin."""

    def __init__(self, row: Row, smoke: bool) -> None:
        super().__init__()
        self.row, self.smoke = row, smoke
        self.model: Any = None
        self.times: list[float] = []

    def configure_model(self) -> None:
        if self.model is None:
            with torch.device("meta"):
                self.model = build(self.row, self.smoke)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.times.append(clock())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self)


def clock() -> float:
    """Seconds, when the device has done what it was asked for."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def batch_of(row: Row, smoke: bool) -> Tensor:
    """Random tokens, [rows, length]."""
    vocabulary = row.config(smoke).vocab_size
    return torch.randint(
        vocabulary, (row.rows, 32 if smoke else row.length), generator=torch.Generator().manual_seed(0)
    )


def by_trainer(row: Row, smoke: bool) -> list[float]:
    """Times at which steps began, under the Trainer."""
    module = Module(row, smoke)
    trainer = L.Trainer(
        accelerator=DEVICE,
        devices=1,
        precision="bf16-true",
        strategy=FSDP2TPStrategy(config=FSDP2Config(**row.fields)),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batch = batch_of(row, smoke)
    trainer.fit(module, DataLoader([batch] * (WARM + STEPS + 1), batch_size=None))  # type: ignore[arg-type]
    return module.times


def by_hand(row: Row, smoke: bool) -> list[float]:
    """The same without Lightning and without this package."""
    with torch.device(DEVICE):
        model: Any = build(row, smoke).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if row.lora:
        model.enable_input_require_grads()
    optimizer, batch = make_optimizer(model), batch_of(row, smoke).to(DEVICE)
    times = []
    for _ in range(WARM + STEPS + 1):
        times.append(clock())
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return times


def flops_of(row: Row, smoke: bool, length: int) -> float:
    """Operations that a row of ``length`` tokens needs; 0: they are no sum over its tokens (adapters on experts)."""
    with torch.device("meta"):
        model = build(replace(row, experts=None), smoke)  # eager experts skip those without tokens
    try:
        return count_model(model).of_documents([length])
    except ValueError:
        return 0.0


def measure(row: Row, smoke: bool) -> dict[str, float]:
    """Seconds per step, tokens in it, floating-point operations that the model needs for them, and peak memory."""
    times = (by_hand if row.by_hand else by_trainer)(row, smoke)
    steps = [after - before for before, after in pairwise(times)]
    length = batch_of(row, smoke).shape[1]
    return {
        "seconds": median(steps[WARM:]),
        "tokens": row.rows * length,
        "flops": row.rows * flops_of(row, smoke, length),
        "peak": torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0,
    }


if __name__ == "__main__":
    task = json.loads(sys.argv[1])
    print(json.dumps(measure(Row(**task["row"]), task["smoke"])))
