"""One GPU, one rank, nccl: the main job runs in bf16-mixed, and float32 gives the numbers of plain PyTorch."""

from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.strategies import Strategy
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaConfig

from lightning_automodel import FSDP2TPStrategy

SIZES = dict(
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_size=1024,
    use_cache=False,
)


class Finetune(L.LightningModule):
    """What a user writes."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.model: torch.nn.Module | None = None
        self.losses: list[float] = []
        self.homes: tuple[set[str], set[str]] = set(), set()

    def configure_model(self) -> None:
        if self.model is None:
            self.model = AutoModelForCausalLM.from_pretrained(self.path).train()

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        assert self.model is not None
        loss = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(loss.item())
        return loss

    def on_train_end(self) -> None:  # Lightning's strategies may move modules to the host afterwards
        self.homes = {p.device.type for p in self.parameters()}, {b.device.type for b in self.buffers()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches() -> list[torch.Tensor]:
    return list(torch.randint(0, 1024, (8, 64), generator=torch.Generator().manual_seed(0)))


def fit(
    path: Path,
    directory: Path,
    precision: str,
    strategy: Strategy | None = None,
    home: str = "cuda",
    devices: int = 1,
) -> list[float]:
    module = Finetune(path)
    trainer = L.Trainer(
        accelerator="gpu",
        devices=devices,
        strategy=strategy or FSDP2TPStrategy(),
        precision=precision,
        max_epochs=1,
        gradient_clip_val=1.0,
        accumulate_grad_batches=2,
        default_root_dir=directory,
        enable_progress_bar=False,
        logger=False,
    )
    trainer.fit(module, DataLoader(batches(), batch_size=2))
    assert module.homes == ({home}, {"cuda"})
    return module.losses


def reference(path: Path, epochs: int = 1) -> list[float]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).cuda().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for i, batch in enumerate(list(DataLoader(batches(), batch_size=2)) * epochs):
        loss = model(input_ids=batch.cuda(), labels=batch.cuda()).loss
        (loss / 2).backward()
        losses.append(loss.item())
        if i % 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def test_fit_on_one_gpu(tmp_path: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).save_pretrained(tmp_path / "model")
    expected = torch.tensor(reference(tmp_path / "model"))
    exact = torch.tensor(fit(tmp_path / "model", tmp_path, "32-true"))
    mixed = torch.tensor(fit(tmp_path / "model", tmp_path, "bf16-mixed"))
    torch.testing.assert_close(exact, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(mixed, expected, rtol=2e-2, atol=0)
