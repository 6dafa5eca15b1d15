"""Features of Lightning that touch the numbers of a run: on two ranks the weights of Lightning on one device."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau

from lightning_automodel import DDPStrategy, FSDP2TPStrategy
from lightning_automodel.testing.pool import Pool
from tests.support.marks import with_long
from tests.support.training import Descending, batches, make_trainer, tiny_llama, whole_parameters


class OwnClipping(Descending):
    """Clips as its author wants."""

    def configure_gradient_clipping(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")


class Plateau(Descending):
    """Lowers the learning rate by the validation loss."""

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.5)
        schedule = ReduceLROnPlateau(optimizer, patience=0, factor=0.1, threshold=0.05)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


class Norms(Descending):
    """Scales its learning rate by Lightning's norm of the gradients."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        total = grad_norm(self, 2)["grad_2.0_norm_total"]
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / float(total)


class Groups(Descending):
    """Decays matrices only, and trains the rest more slowly."""

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.ndim > 1]
        rest = [p for p in self.parameters() if p.ndim <= 1]
        return SGD([{"params": matrices, "weight_decay": 0.1}, {"params": rest, "lr": 0.01}], lr=0.1, momentum=0.9)


class OwnStep(Descending):
    """Warms up in its own hook."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable | None = None
    ) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * min(1.0, (self.trainer.global_step + 1) / 3)
        optimizer.step(closure=optimizer_closure)


class OneCycle(Descending):
    """A schedule that asks the trainer how many steps there are."""

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.3)
        steps = int(self.trainer.estimated_stepping_batches)
        return [optimizer], [{"scheduler": OneCycleLR(optimizer, 0.3, total_steps=steps), "interval": "step"}]


class OwnBackward(Descending):
    """Scales its loss."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (loss * 2).backward()


class Manual(Descending):
    """Accumulates, clips and steps by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch) / 2)
        if batch_idx % 2:
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()


class Built(Descending):
    """Has its model from the start, as Lightning's own averaging needs it on one device."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_llama()


class Normed(Built):
    """With a batch norm, whose means an average counts in an epoch more, without a backward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.head = nn.BatchNorm1d(5), nn.Linear(5, 3)

    def loss(self, batch: list[Tensor]) -> Tensor:
        normed = self.norm(torch.arange(10.0).view(2, 5).square())  # of the same rows on every rank
        return super().loss(batch) + self.head(normed).square().mean()


@dataclass(frozen=True)
class Feature:
    """What a user writes."""

    module: type[Descending] = Descending
    trainer: dict[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], list[Any]] = list


FEATURES = {
    "accumulation scheduler": Feature(
        trainer={"max_epochs": 3}, callbacks=lambda: [callbacks.GradientAccumulationScheduler({0: 1, 1: 2, 2: 4})]
    ),
    "fast_dev_run": Feature(trainer={"fast_dev_run": 2}),
    "overfit_batches": Feature(trainer={"overfit_batches": 2, "max_epochs": 2}),
    "reload_dataloaders": Feature(trainer={"reload_dataloaders_every_n_epochs": 1, "max_epochs": 2}),
    "limits": Feature(trainer={"limit_train_batches": 3, "limit_val_batches": 0.5, "val_check_interval": 2}),
    "min_steps": Feature(trainer={"max_epochs": 1, "min_steps": 6}),
    "detect_anomaly": Feature(trainer={"detect_anomaly": True}),
    "profiler": Feature(trainer={"profiler": "pytorch"}),
    "clipping by value": Feature(trainer={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "clipping of one's own": Feature(OwnClipping),
    "norms": Feature(Norms),
    "plateau": Feature(Plateau, {"max_epochs": 4}),
    "one cycle": Feature(OneCycle, {"max_epochs": 2}),
    "parameter groups": Feature(Groups, {"max_epochs": 2}),
    "optimizer_step": Feature(OwnStep, {"max_epochs": 2}),
    "backward": Feature(OwnBackward),
    "by hand": Feature(Manual, {"max_epochs": 2}),
    "early stopping": Feature(
        trainer={"max_epochs": 6}, callbacks=lambda: [callbacks.EarlyStopping("val_loss", patience=0, min_delta=0.2)]
    ),
    "moving average": Feature(Built, {"max_epochs": 2}, lambda: [callbacks.EMAWeightAveraging(decay=0.5)]),
    "stochastic average": Feature(
        Built, {"max_epochs": 4}, lambda: [callbacks.StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2)]
    ),
    "stochastic average of norms": Feature(
        Normed,
        {"max_epochs": 3, "limit_val_batches": 0},  # validation would clear the gradients with which Lightning steps
        lambda: [callbacks.StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=2)],
    ),
    "summary": Feature(callbacks=lambda: [callbacks.ModelSummary(max_depth=-1), callbacks.RichModelSummary()]),
}
FAST = ("accumulation scheduler", "parameter groups")
STRATEGIES: dict[str, tuple[Callable[[], Strategy], int]] = {
    "tp": (lambda: FSDP2TPStrategy(tp=2), 1),
    "dp_shard": (FSDP2TPStrategy, 2),
    "ddp": (DDPStrategy, 2),
}


def run(strategy: Strategy, name: str, data_ranks: int, folder: Path) -> tuple[dict[str, Tensor], int, list[float]]:
    """The weights behind a run, its steps, and its last learning rates."""
    feature = FEATURES[name]
    module = feature.module()
    arguments = {"max_epochs": 1, "default_root_dir": folder, **feature.trainer}
    trainer = make_trainer(strategy, callbacks=feature.callbacks(), **arguments)
    trainer.fit(module, batches(data_ranks), batches(data_ranks))
    rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
    return whole_parameters(module), trainer.global_step, rates


def on_ranks(strategy: str, name: str, folder: Path) -> tuple[dict[str, Tensor], int, list[float]]:
    """Runs on each rank."""
    make, data_ranks = STRATEGIES[strategy]
    return run(make(), name, data_ranks, folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", with_long(FEATURES, *(name for name in FEATURES if name not in FAST)))
def test_as_on_one_device(name: str, pool2: Pool, tmp_path: Path) -> None:
    weights, steps, rates = run(SingleDeviceStrategy(), name, 1, tmp_path)
    before = dict(tiny_llama().named_parameters())
    assert any(not torch.equal(weights[f"model.{key}"], value) for key, value in before.items())
    for strategy in STRATEGIES:
        for found, taken, lowered in pool2.run(on_ranks, strategy, name, tmp_path, trainer=True):
            torch.testing.assert_close(found, weights, rtol=1e-4, atol=1e-5)
            assert taken == steps
            assert lowered == pytest.approx(rates, rel=1e-5)
