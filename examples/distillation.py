"""A student learns from a teacher: python -m examples.distillation, after python -m examples.quickstart.

The strategy makes both models parallel. They share a tokenizer; the teacher is frozen, and may be of another family.
"""

from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from torch.optim import AdamW
from transformers import AutoModelForCausalLM

from lightning_automodel import FSDP2TPStrategy
from lightning_automodel.finetuning import HuggingFaceExport, TextDataModule

ACCELERATOR, DEVICES = "cpu", 2  # cluster: "gpu", 8
TEACHER, STUDENT, FILES = "build/quickstart/export", "build/quickstart/model", "build/quickstart/text/*.py"  # yours
OUTPUT = "build/distillation"


class Distillation(L.LightningModule):
    """Trains a student on the teacher's probabilities, and on the text."""

    def __init__(self, teacher: str, student: str, temperature: float = 2.0, weight: float = 0.5) -> None:
        super().__init__()
        self.teacher_name, self.model_name = teacher, student
        self.temperature, self.weight = temperature, weight
        self.teacher: Any = None
        self.student: Any = None

    def configure_model(self) -> None:
        """Builds both models; the strategy makes them parallel before their weights are read."""
        if self.student is None:
            self.teacher = AutoModelForCausalLM.from_pretrained(self.teacher_name).requires_grad_(False)
            self.student = AutoModelForCausalLM.from_pretrained(self.model_name).train()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The mean over the rows of a micro-batch, of the means over the tokens of a row."""
        targets = batch.pop("labels")[:, 1:]  # [rows, width - 1]
        counted = targets != -100
        student = self.student(**batch, use_cache=False).logits[:, :-1].float()  # [rows, width - 1, vocabulary]
        with torch.no_grad():
            teacher = self.teacher(**batch, use_cache=False).logits[:, :-1].float()
        soft, hard = self._distance(student, teacher), cross_entropy(student.mT, targets, reduction="none")
        losses = self.weight * soft + (1 - self.weight) * hard
        loss = ((losses * counted).sum(1) / counted.sum(1).clamp(min=1)).mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def _distance(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Kullback-Leibler divergence of softened probabilities [rows, tokens], of the size of its gradient at 1."""
        softened = [log_softmax(logits / self.temperature, dim=-1) for logits in (student, teacher)]
        return kl_div(*softened, reduction="none", log_target=True).sum(-1) * self.temperature**2

    def configure_optimizers(self) -> AdamW:
        """One optimizer over the student."""
        return AdamW(self.student.parameters(), lr=1e-3)


def main(
    teacher: str = TEACHER, student: str = STUDENT, files: str = FILES, output: str = OUTPUT, **arguments: Any
) -> None:
    """Trains, and exports the student."""
    data = TextDataModule(train_files=files, sequence_length=128, batch_size=4, packing=True, cache_dir=output)
    trainer = L.Trainer(
        strategy=FSDP2TPStrategy(tp=2),
        accelerator=ACCELERATOR,
        devices=DEVICES,
        default_root_dir=output,
        logger=False,
        callbacks=[HuggingFaceExport(f"{output}/export")],
        **{"max_steps": 20, "enable_checkpointing": False, **arguments},
    )
    trainer.fit(Distillation(teacher, student), data)


if __name__ == "__main__":
    main()
