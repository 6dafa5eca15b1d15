"""What a user of Lightning writes around a model; imported by ranks that have Lightning."""

import time
from collections.abc import Callable
from typing import Any

import lightning as L
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks._by_torch import clip, optimizer_of


class Module(L.LightningModule):
    """A model that is read in ``configure_model``.

    Args:
        read: gives the model.
        shard: what the user of a strategy does by hand, with model and mesh.
        times: takes the time at which each step is done.
    """

    def __init__(self, read: Callable[[], Any], shard: Callable[[Any, Any], Any] | None, times: list[float]) -> None:
        super().__init__()
        self.read, self.shard, self.times = read, shard, times
        self.model: Any = None

    def configure_model(self) -> None:
        """From files, then split by hand where the strategy leaves it to its user."""
        if self.model is None:
            self.model = self.read().train()
            if self.shard is not None:
                self.shard(self.model, self.device_mesh)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The model's own loss."""
        return self.model(**batch).loss

    def on_train_batch_end(self, *_: Any) -> None:
        """A step is done."""
        self.times.append(time.time())

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any = None, **kwargs: Any) -> None:
        """By the strategy, or by hand what was split by hand."""
        if self.shard is None:
            super().configure_gradient_clipping(optimizer, gradient_clip_val, **kwargs)
        else:
            clip([p for p in self.parameters() if p.requires_grad], gradient_clip_val)

    def configure_optimizers(self) -> Any:
        """As for all ways."""
        return optimizer_of(self)


def fit(module: Module, strategy: Any, data: Any, rows: int, **options: Any) -> L.Trainer:
    """Run a trainer that does nothing beside training."""
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, **quiet, **options)
    trainer.fit(module, DataLoader(data, batch_size=rows))
    return trainer
