"""Records what a run shows: the table at its start, and the bar of steps, also after a resume within an epoch."""

import argparse
import logging
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from rich.console import Console
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks._measure import describe_machine
from benchmarks._page import DOCS
from lightning_automodel import FSDP2TPStrategy
from lightning_automodel.callbacks import Health, RichStepBar, Throughput

WIDTH, LENGTH, ROWS = 132, 128, 48
PEAK = 1e11
"""FLOP/s that the CPU's MFU is told of; not its own."""


class Small(L.LightningModule):
    """Trains a Llama of a million parameters on random tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "vocab_size": 2048}
            self.model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, use_cache=False))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Frames(Callback):
    """Prints the bar as it is after every log, to a console that keeps what it prints."""

    def __init__(self, bar: RichStepBar, console: Console, every: int) -> None:
        self.bar, self.console, self.every = bar, console, every

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        is_end = (trainer.fit_loop.batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if is_end and trainer.global_step % self.every == 0 and self.bar.progress is not None:
            self.console.print(self.bar.progress.get_renderable())


class Table(logging.Handler):
    """Keeps the table of a run's start."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("this run"):
            self.text = record.getMessage()


def rows() -> list[dict[str, Tensor]]:
    """Rows of different lengths, padded."""
    generator, found = torch.Generator().manual_seed(0), []
    for i in range(ROWS):
        ids = torch.randint(2048, (LENGTH,), generator=generator)
        mask = (torch.arange(LENGTH) < LENGTH - 8 * (i % 8)).long()
        found.append({"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask})
    return found


def run(console: Console, folder: str, path: str | None) -> None:
    """Train two epochs of 12 steps, two micro-batches each."""
    bar = RichStepBar(console_kwargs={"file": open("/dev/null", "w"), "force_terminal": True, "width": WIDTH})  # noqa: SIM115
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=6, save_top_k=-1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=FSDP2TPStrategy(),
        max_epochs=2,
        accumulate_grad_batches=2,
        log_every_n_steps=2,
        logger=False,
        enable_model_summary=False,
        gradient_clip_val=1.0,
        callbacks=[Throughput(peak=PEAK), Health(), bar, Frames(bar, console, 4), saver],
    )
    trainer.fit(Small(), DataLoader(rows(), batch_size=2), ckpt_path=path)  # type: ignore[arg-type]


def main() -> None:
    """Entry point of ``python -m benchmarks.pictures.bar``: write docs/recordings.md and docs/images/bar.svg."""
    argparse.ArgumentParser(prog="python -m benchmarks.pictures.bar", description=__doc__).parse_args()
    table, logger = Table(), logging.getLogger("lightning_automodel")
    logger.addHandler(table)
    consoles = [Console(record=True, width=WIDTH, file=open("/dev/null", "w")) for _ in range(2)]  # noqa: SIM115
    with tempfile.TemporaryDirectory() as folder:
        run(consoles[0], folder, None)
        started = table.text
        run(consoles[1], folder, str(Path(folder) / "step=6.ckpt"))
    consoles[0].save_svg(str(DOCS / "images" / "bar.svg"), title="RichStepBar", clear=False)
    lines = ["# Recordings", "", f"{describe_machine()}; `python -m benchmarks.pictures.bar`", ""]
    lines += ["The table at the start:", "", "```text", *started.splitlines(), "```", ""]
    lines += ["The bar after every fourth step ([as a picture](images/bar.svg)):", ""]
    lines += ["```text", *_lines(consoles[0]), "```", ""]
    lines += ["Of a run that goes on from step 6, in the middle of the first epoch:", ""]
    (DOCS / "recordings.md").write_text("\n".join([*lines, "```text", *_lines(consoles[1]), "```", ""]))


def _lines(console: Console) -> list[str]:
    return [line.rstrip() for line in console.export_text().splitlines() if line.strip()]


if __name__ == "__main__":
    main()
