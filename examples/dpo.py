"""DPO as a LightningModule of one's own: python -m examples.dpo, after python -m examples.quickstart.

The loss of a pair is ``-log sigmoid(beta * margin)``, where the margin is how much more the policy prefers the chosen
answer than the reference does. The strategy makes both models parallel; the reference is frozen.
"""

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, logsigmoid
from torch.optim import AdamW
from transformers import AutoModelForCausalLM

from lightning_automodel import FSDP2TPStrategy
from lightning_automodel.finetuning import HuggingFaceExport, PreferenceDataModule

ACCELERATOR, DEVICES = "cpu", 2  # cluster: "gpu", 8
MODEL, FILES = "build/quickstart/export", "build/quickstart/pairs.jsonl"  # yours
OUTPUT = "build/dpo"


class DPO(L.LightningModule):
    """Trains a policy on preference pairs, beside a frozen copy of where it began."""

    def __init__(self, path: str, beta: float = 0.1, lr: float = 1e-4) -> None:
        super().__init__()
        self.model_name, self.beta, self.lr = path, beta, lr
        self.policy: Any = None
        self.reference: Any = None

    def configure_model(self) -> None:
        """Builds both models; the strategy makes them parallel before their weights are read."""
        if self.policy is None:
            self.policy = AutoModelForCausalLM.from_pretrained(self.model_name).train()
            self.reference = AutoModelForCausalLM.from_pretrained(self.model_name).requires_grad_(False)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The mean over the pairs of a micro-batch."""
        with torch.no_grad():
            before = preference(self.reference, batch)  # [pairs]
        margin = preference(self.policy, batch) - before
        loss = -logsigmoid(self.beta * margin).mean()
        self.log("loss", loss, prog_bar=True)
        self.log("accuracy", (margin > 0).float().mean(), prog_bar=True)
        return loss

    def configure_optimizers(self) -> AdamW:
        """One optimizer over the policy."""
        return AdamW(self.policy.parameters(), lr=self.lr)


def preference(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Log-probability of the chosen answer less that of the rejected one [pairs]."""
    chosen, rejected = log_probability(model, batch).chunk(2)
    return chosen - rejected


def log_probability(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Log-probability of the answer in each row [rows]."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
    targets = batch["labels"][:, 1:]  # [rows, width - 1], -100 where there is no answer
    return -cross_entropy(logits[:, :-1].float().transpose(1, 2), targets, reduction="none").sum(1)


def main(model: str = MODEL, files: str = FILES, output: str = OUTPUT, **arguments: Any) -> None:
    """Trains, and exports the policy."""
    data = PreferenceDataModule(train_files=files, batch_size=4)
    trainer = L.Trainer(
        strategy=FSDP2TPStrategy(tp=2),
        accelerator=ACCELERATOR,
        devices=DEVICES,
        default_root_dir=output,
        logger=False,
        callbacks=[HuggingFaceExport(f"{output}/export")],
        **{"max_steps": 20, "enable_checkpointing": False, **arguments},
    )
    trainer.fit(DPO(model), data)


if __name__ == "__main__":
    main()
