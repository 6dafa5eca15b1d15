"""A tiny language model in a LightningModule, one for Lightning's own strategy, and trainers that write nothing."""

from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from transformers import AutoModelForCausalLM, LlamaConfig

from lightning_automodel import FSDP2TPStrategy

VOCABULARY = 61
CONFIG = dict(
    hidden_size=24,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=VOCABULARY,
    use_cache=False,
)


class TinyModule(L.LightningModule):
    """Trains a Llama of a few thousand parameters, and remembers the numbers of the rows that each stage saw."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Any = None
        self.seen: dict[str, list[int]] = {}

    def configure_model(self) -> None:
        if self.model is None:
            with torch.random.fork_rng():
                torch.manual_seed(0)
                self.model = AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG))

    def loss(self, batch: list[Tensor]) -> Tensor:
        """Mean loss per token; notes the rows."""
        ids = batch[0]
        stage = self.trainer.state.stage
        assert stage is not None
        self.seen.setdefault(stage.value, []).extend(ids[:, 0].tolist())
        return self.model(input_ids=ids, labels=ids).loss

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.loss(batch)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> list[int]:
        self.loss(batch)
        return batch[0][:, 0].tolist()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class StockModule(TinyModule):
    """For Lightning's own strategy, which leaves the sharding to its user."""

    def configure_model(self) -> None:
        if self.model is None:
            mesh = self.device_mesh["data_parallel"]
            block = fully_shard(nn.Linear(4, 4), mesh=mesh)
            self.model = fully_shard(nn.Sequential(nn.Embedding(VOCABULARY, 4), block), mesh=mesh)

    def loss(self, batch: list[Tensor]) -> Tensor:
        stage = self.trainer.state.stage
        assert stage is not None
        self.seen.setdefault(stage.value, []).extend(batch[0][:, 0].tolist())
        return self.model(batch[0]).square().mean()


def trainer(devices: int, strategy: Any = None, *, stock: bool = False, **kwargs: Any) -> L.Trainer:
    """A trainer on CPU without files and bars.

    Args:
        devices: all processes.
        strategy: arguments of the strategy, or a strategy.
        stock: Lightning's strategy, with the sizes of the same arguments.
        kwargs: of the trainer.
    """
    sizes = strategy or {}
    if stock:
        tp = sizes.pop("tp", 1)
        strategy = ModelParallelStrategy(devices // tp, tp, **sizes)
    elif isinstance(sizes, dict):
        strategy = FSDP2TPStrategy(**sizes)
    settings: dict[str, Any] = dict(
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        max_epochs=1,
    )
    return L.Trainer(accelerator="cpu", devices=devices, strategy=strategy, **{**settings, **kwargs})


def rows(count: int, length: int = 6) -> Tensor:
    """Random token ids [count, length]; the first one of each row is its number."""
    ids = torch.randint(VOCABULARY, (count, length), generator=torch.Generator().manual_seed(1))
    ids[:, 0] = torch.arange(count)
    return ids


def loader(count: int, batch_size: int = 1, **kwargs: Any) -> DataLoader:
    """Batches of numbered rows."""
    return DataLoader(TensorDataset(rows(count)), batch_size=batch_size, **kwargs)


class Stream(IterableDataset):
    """Numbered rows, one after the other."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return ((row,) for row in rows(self.count))


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.count
