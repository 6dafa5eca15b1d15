"""A reward head learns from preference pairs: python -m examples.reward, after python -m examples.quickstart.

The head is new; transformers draws it, equal on all ranks. What is exported, AutoModelForSequenceClassification reads.
"""

from typing import Any

import lightning as L
from torch import Tensor
from torch.nn.functional import logsigmoid
from torch.optim import AdamW
from transformers import AutoModelForSequenceClassification

from lightning_automodel import FSDP2TPStrategy
from lightning_automodel.finetuning import HuggingFaceExport, PreferenceDataModule

ACCELERATOR, DEVICES = "cpu", 2  # cluster: "gpu", 8
MODEL, FILES = "build/quickstart/export", "build/quickstart/pairs.jsonl"  # yours
OUTPUT = "build/reward"


class RewardModel(L.LightningModule):
    """Trains a scalar per row so that chosen answers get more than rejected ones."""

    def __init__(self, path: str, pad_token_id: int, lr: float = 1e-4) -> None:
        super().__init__()
        self.model_name, self.pad_token_id, self.lr = path, pad_token_id, lr
        self.model: Any = None

    def configure_model(self) -> None:
        """Builds the model; it reads the reward off the last token that is not ``pad_token_id``."""
        if self.model is None:
            self.model = AutoModelForSequenceClassification.from_pretrained(
                self.model_name, num_labels=1, pad_token_id=self.pad_token_id
            ).train()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The mean over the pairs of a micro-batch."""
        inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
        chosen, rejected = self.model(**inputs, use_cache=False).logits.squeeze(-1).chunk(2)  # each [pairs]
        loss = -logsigmoid(chosen - rejected).mean()
        self.log("loss", loss, prog_bar=True)
        self.log("accuracy", (chosen > rejected).float().mean(), prog_bar=True)
        return loss

    def configure_optimizers(self) -> AdamW:
        """One optimizer over all parameters."""
        return AdamW(self.parameters(), lr=self.lr)


def main(model: str = MODEL, files: str = FILES, output: str = OUTPUT, **arguments: Any) -> None:
    """Trains, and exports the model with its head."""
    data = PreferenceDataModule(tokenizer=model, train_files=files, batch_size=4)
    trainer = L.Trainer(
        strategy=FSDP2TPStrategy(tp=2),
        accelerator=ACCELERATOR,
        devices=DEVICES,
        default_root_dir=output,
        logger=False,
        callbacks=[HuggingFaceExport(f"{output}/export")],
        **{"max_steps": 20, "enable_checkpointing": False, **arguments},
    )
    trainer.fit(RewardModel(model, data.pad_token_id), data)


if __name__ == "__main__":
    main()
