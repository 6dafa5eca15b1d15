"""A tiny LightningModule whose runs can be compared in any layout, its data, and trainers that write nothing."""

import os
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_automodel import FSDP2TPStrategy

VOCABULARY = 61  # odd: shards differ in size
HIDDEN = 24
ROWS, LENGTH, GLOBAL_BATCH = 16, 6, 4  # cp=2 leaves fewer than 8 tokens whole


def tiny_llama(tied: bool = True) -> LlamaForCausalLM:
    """The same weights in every process."""
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=VOCABULARY,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config)


class Recorder(L.LightningModule):
    """Keeps what each training step gives: the loss over all data ranks, and a random number."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.tied = tied
        self.model: Any = None
        self.losses: list[float] = []
        self.draws: list[float] = []

    def configure_model(self) -> None:
        if self.model is None:
            self.model = tiny_llama(self.tied)

    def loss(self, batch: list[Tensor]) -> Tensor:
        """Mean over the tokens of this rank."""
        return self.model(input_ids=batch[0], labels=batch[0]).loss

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach().clone())))
        self.draws.append(float(torch.rand(())))
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=8)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Descending(Recorder):
    """Steps by plain gradient descent."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SaveAfter(L.Callback):
    """Saves when ``count`` batches are through."""

    def __init__(self, path: Path, count: int) -> None:
        self.path, self.count = path, count

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx + 1 == self.count:
            trainer.save_checkpoint(self.path)


class Memory(Logger):
    """Keeps what is logged."""

    name, version = "memory", 0

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[dict[str, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.logged.append(metrics)

    def log_hyperparams(self, *args: Any) -> None:
        pass


def world_size() -> int:
    """Of the pool whose rank this is; 1 outside of pools."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rows(count: int = ROWS) -> Tensor:
    """Token ids, int64 [count, length]."""
    return torch.randint(VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(1))


def batches(data_size: int, count: int = ROWS, **arguments: Any) -> DataLoader:
    """Batches that are the same for all data ranks together, in any layout."""
    return DataLoader(TensorDataset(rows(count)), batch_size=GLOBAL_BATCH // data_size, **arguments)


def make_trainer(strategy: Strategy | dict[str, Any] | str, **arguments: Any) -> L.Trainer:
    """A quiet trainer on all ranks of the pool, or of torchrun; ``strategy`` may be the arguments of ours."""
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))
    return L.Trainer(
        devices=local,
        num_nodes=world_size() // local,
        strategy=FSDP2TPStrategy(**strategy) if isinstance(strategy, dict) else strategy,
        **{**dict.fromkeys(quiet, False), "accelerator": "cpu", "num_sanity_val_steps": 0, **arguments},
    )


def fit(
    sizes: dict[str, Any],
    directory: Path | str,
    *,
    epochs: int = 3,
    resume: Path | str | None = None,
    module: Recorder | None = None,
    **arguments: Any,
) -> tuple[Recorder, dict[str, Tensor]]:
    """Trains, saving ``epoch=N.ckpt`` after each epoch; returns the module and its whole parameters."""
    module = Recorder() if module is None else module
    saver = ModelCheckpoint(dirpath=directory, filename="{epoch}", save_top_k=-1)
    arguments = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2, **arguments}
    run = make_trainer(sizes, max_epochs=epochs, enable_checkpointing=True, callbacks=[saver], **arguments)
    run.fit(module, batches(world_size() // sizes.get("tp", 1), shuffle=True), ckpt_path=resume)
    return module, whole_parameters(module)


def whole_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Copies of the module's parameters."""
    return {name: whole(p) for name, p in module.named_parameters()}


def whole(tensor: Tensor | None) -> Tensor:
    """A plain copy without a graph."""
    assert tensor is not None
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def largest_difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Of an element of the ``parameters`` of two runs."""
    return max(float((value - other["parameters"][name]).abs().max()) for name, value in one["parameters"].items())
