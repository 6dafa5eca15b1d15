"""A LightningModule of one's own: python -m examples.finetune MODEL_DIRECTORY 'data/*.txt' [TP].

Nothing in the module knows of meshes, plans or shards; the strategy does.
"""

import sys

import lightning as L
import torch
from torch import Tensor
from torch.optim import AdamW
from transformers import AutoModelForCausalLM

from lightning_automodel import FSDP2TPStrategy
from lightning_automodel.finetuning import TextDataModule


class Finetune(L.LightningModule):
    """Trains on the mean loss of each micro-batch; ``CausalLM`` weighs by tokens."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.model: torch.nn.Module | None = None

    def configure_model(self) -> None:
        """Builds the model; the strategy makes it parallel before its weights are read."""
        if self.model is None:
            self.model = AutoModelForCausalLM.from_pretrained(self.path).train()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The loss of one micro-batch."""
        assert self.model is not None
        loss = self.model(**batch, use_cache=False).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> AdamW:
        """One optimizer over all parameters."""
        return AdamW(self.parameters(), lr=1e-4)


def main() -> None:
    """Trains 20 steps on two processes."""
    path, files, *rest = sys.argv[1:]
    tp = int(rest[0]) if rest else 2
    accelerator = "gpu" if torch.cuda.is_available() else "cpu"
    data = TextDataModule(tokenizer=path, train_files=files, sequence_length=128, batch_size=4)
    trainer = L.Trainer(strategy=FSDP2TPStrategy(tp=tp), accelerator=accelerator, devices=2, max_steps=20)
    trainer.fit(Finetune(path), data)


if __name__ == "__main__":
    main()
