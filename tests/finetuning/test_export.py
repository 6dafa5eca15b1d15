"""The export is what plain transformers loads, from one process and from a tensor-parallel one."""

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightning_automodel import FSDP2TPStrategy
from lightning_automodel.finetuning import CausalLM, HuggingFaceExport, TextDataModule
from lightning_automodel.testing.pool import Pool


def _fit(model_dir: str, directory: Path, **trainer: Any) -> float:
    """Trains two steps, exports to ``directory / "export"`` and returns the last validation loss."""
    text = directory / f"text{torch.distributed.is_initialized()}.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * 30)
    data = TextDataModule(
        train_files=str(text),
        val_files=str(text),
        sequence_length=32,
        batch_size=2,
        packing=True,
        cache_dir=str(directory),
    )
    settings = {"accelerator": "cpu", "devices": 1, "max_steps": 2, "logger": False, "enable_progress_bar": False}
    callbacks = [HuggingFaceExport(str(directory / "export"))]
    run = L.Trainer(**(settings | trainer), callbacks=callbacks, enable_checkpointing=False, default_root_dir=directory)
    run.fit(CausalLM(model_dir, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), lr_scheduler=None), data)
    return float(run.validate(run.lightning_module, data, verbose=False)[0]["val/loss"])


def _fit_tp(model_dir: str, directory: Path) -> float:
    return _fit(model_dir, directory, devices=2, strategy=FSDP2TPStrategy(tp=2))


def _held_out_loss(export: Path, directory: Path) -> float:
    (text,) = directory.glob("text*.txt")
    data = TextDataModule(
        tokenizer=str(export),
        val_files=str(text),
        sequence_length=32,
        packing=True,
        cache_dir=str(directory),
        batch_size=99,
    )
    data.setup("validate")
    (batch,) = data.val_dataloader()
    model = AutoModelForCausalLM.from_pretrained(export).eval()
    with torch.no_grad():
        return float(model(**batch, use_cache=False).loss)


def _check(model_dir: Path, directory: Path, loss: float) -> None:
    export = directory / "export"
    assert _held_out_loss(export, directory) == pytest.approx(loss, rel=1e-5)
    assert AutoTokenizer.from_pretrained(export).eos_token == "<eos>"
    with (
        safe_open(export / "model.safetensors", "pt") as file,
        safe_open(model_dir / "model.safetensors", "pt") as base,
    ):
        assert set(file.keys()) == set(base.keys())  # the tied head is not there
    config, original = (json.loads((path / "config.json").read_text()) for path in (export, model_dir))
    assert config == original | {"use_cache": config["use_cache"]}


def test_export_from_one_process(model_dir: Path, tmp_path: Path) -> None:
    _check(model_dir, tmp_path, _fit(str(model_dir), tmp_path))


def test_export_from_two_tensor_parallel_ranks(model_dir: Path, tmp_path: Path, pool2: Pool) -> None:
    first, second = pool2.run(_fit_tp, str(model_dir), tmp_path, trainer=True)
    assert first == second
    _check(model_dir, tmp_path, first)


def test_a_module_without_one_model_is_refused(tmp_path: Path) -> None:
    class Plain(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.layer(batch).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        callbacks=[HuggingFaceExport(str(tmp_path / "export"))],
    )
    with pytest.raises(ValueError, match="Plain holds 0 Hugging Face models"):
        trainer.fit(Plain(), torch.utils.data.DataLoader(torch.ones(2, 1)))
