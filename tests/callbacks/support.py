"""A module whose batches are dicts with padding, its data, and trainers with callbacks."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from tests.support.training import LENGTH, Memory, Recorder, make_trainer, rows

ROWS, GLOBAL_BATCH = 16, 4


class Dicts(Recorder):
    """Reads dicts, as models of transformers take them."""

    def loss(self, batch: Any) -> Tensor:
        self.log("train/loss", (loss := self.model(**batch).loss))
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


def padded_rows() -> list[dict[str, Tensor]]:
    """Rows of 2 to 6 real tokens."""
    found = []
    for i, ids in enumerate(rows(ROWS)):
        mask = (torch.arange(LENGTH) < 2 + i % 5).long()
        found.append({"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask})
    return found


def lengths() -> list[int]:
    return [int(row["attention_mask"].sum()) for row in padded_rows()]


def loader(data_size: int) -> DataLoader:
    return DataLoader(padded_rows(), batch_size=GLOBAL_BATCH // data_size)  # type: ignore[arg-type]


def train(strategy: Any, data_size: int, callbacks: list[Any], **arguments: Any) -> tuple[Any, Dicts, Memory]:
    """One epoch of 4 batches, or what ``arguments`` say; returns the trainer, its module and what was logged."""
    memory, module, path = Memory(), arguments.pop("module", None) or Dicts(), arguments.pop("ckpt_path", None)
    settings = {"max_epochs": 1, "log_every_n_steps": 1, "logger": memory, "callbacks": callbacks, **arguments}
    trainer = make_trainer(strategy, **settings)
    trainer.fit(module, loader(data_size), ckpt_path=path)
    return trainer, module, memory


def saver(directory: Path | str, every: int) -> ModelCheckpoint:
    return ModelCheckpoint(dirpath=directory, filename="{step}", every_n_train_steps=every, save_top_k=-1)


def logged(memory: Memory, name: str) -> list[float]:
    return [entry[f"train/{name}"] for entry in memory.logged if f"train/{name}" in entry]
