"""What the planner says of a rank's parameters, gradients and optimizer is what a rank of a trainer holds."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from lightning_automodel import FSDP2Config, FSDP2TPStrategy
from lightning_automodel.finetuning import CausalLM
from lightning_automodel.mesh import resolve_sizes
from lightning_automodel.planner.plan import build
from lightning_automodel.planner.play import Run, play, stage
from lightning_automodel.testing.pool import Pool
from tests.planner.subjects import LORA, bytes_of
from tests.support.families import tiny_config
from tests.support.marks import with_long

FROZEN = ["model.embed_tokens", "model.layers.0.*"]
TRAINS: dict[str, dict[str, Any]] = {"adapters": {"peft": LORA}, "not all": {"freeze": FROZEN}, "all": {}}
SIZES: dict[str, dict[str, int]] = {"dp_shard=2": {}, "tp=2": {"tp": 2}}
CASES = [(precision, trains) for precision in ("bf16-true", "bf16-mixed") for trains in TRAINS]


class Gradients(Callback):
    """Counts the bytes of gradients while they are there."""

    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Any) -> None:
        self.bytes = bytes_of([p.grad for p in module.parameters()])


def train(path: Path, sizes: dict[str, int], precision: Any, trains: dict[str, Any]) -> dict[str, int]:
    """Runs on each rank: what it holds behind two steps."""
    module = CausalLM(str(path), lr_scheduler=None, **trains)
    ids, gradients = torch.randint(16, (8, 32)), Gradients()
    rows = [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in ids]
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=FSDP2TPStrategy(**sizes),
        precision=precision,
        max_steps=2,
        callbacks=[gradients],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(rows, batch_size=2))  # type: ignore[arg-type]
    states = [value for state in trainer.optimizers[0].state.values() for value in state.values()]
    model = module.model
    return {
        "parameters": bytes_of([*model.parameters(), *model.buffers()]),
        "gradients": gradients.bytes,
        "optimizer": bytes_of(states),
    }


@pytest.mark.slow
@pytest.mark.parametrize("layout", SIZES)
@pytest.mark.parametrize(("precision", "trains"), with_long(CASES, *CASES[1:]))
def test_a_rank_holds_what_was_planned(layout: str, precision: str, trains: str, pool2: Pool, tmp_path: Path) -> None:
    path = tmp_path / "model"
    AutoModelForCausalLM.from_config(tiny_config("llama")).save_pretrained(path)
    held = pool2.run(train, path, SIZES[layout], precision, TRAINS[trains], trainer=True, timeout=110)[0]
    run = Run(
        sizes=resolve_sizes(2, **SIZES[layout]),
        config=FSDP2Config(),
        sequence_length=32,
        micro_batch=2,
        precision=precision,
        device_type="cpu",
    )
    model = build(str(path), TRAINS[trains].get("peft"), TRAINS[trains].get("freeze", ()))
    with stage(run) as mesh:
        planned = play(model, run, mesh).peaks["clipping"]
    assert held == {role: planned[role] for role in held}
