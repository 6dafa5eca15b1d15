"""Habits of Lightning's users, found by its own tests (``tests/lightning_suite.py``), under both strategies."""

import copy
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, ModelPruning, StochasticWeightAveraging
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_automodel import DDPStrategy, FSDP2TPStrategy
from lightning_automodel.testing.pool import Nursery, Pool
from tests.support.training import (
    Recorder,
    batches,
    make_trainer,
    tiny_llama,
    whole_parameters,
    world_size,
)

STRATEGIES = {"fsdp2": FSDP2TPStrategy, "ddp": DDPStrategy}


class Layer(L.LightningModule):
    """Keeps the entries of the checkpoint that it is shown."""

    def __init__(self, skips: bool = False) -> None:
        super().__init__()
        self.skips = skips
        self.layer = nn.Linear(4, 2)
        self.shown: set[str] = set()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor | None:
        loss = self.layer(batch).square().mean()
        return None if self.skips else loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.layer(batch)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(4, 4), batch_size=2)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.shown = set(checkpoint)


class WithoutOptimizer(Layer):
    def configure_optimizers(self) -> None:
        return None


class Averaged(Layer):
    def configure_callbacks(self) -> Any:
        return [EMAWeightAveraging(decay=0.5)]


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_connected_module_is_saved_without_a_run(name: str, tmp_path: Path) -> None:
    trainer, module = make_trainer(STRATEGIES[name]()), Layer()
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "whole.ckpt")
    loaded = Layer.load_from_checkpoint(tmp_path / "whole.ckpt")
    assert torch.equal(loaded.layer.weight, module.layer.weight)
    assert [trainer.strategy.reduce_boolean_decision(vote) for vote in (True, False)] == [True, False]


@pytest.mark.parametrize("name", STRATEGIES)
def test_steps_are_estimated_before_a_run(name: str) -> None:
    """A schedule is often built from them, outside of ``fit``."""
    trainer = make_trainer(STRATEGIES[name](), max_epochs=2, accumulate_grad_batches=2)
    module = Layer()
    trainer.strategy.connect(module)
    trainer._data_connector.attach_data(module, train_dataloaders=torch.utils.data.DataLoader(torch.ones(6, 4)))
    assert trainer.estimated_stepping_batches == 6


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_trainer_can_be_copied(name: str) -> None:
    copied = copy.deepcopy(make_trainer(STRATEGIES[name]()))
    assert isinstance(copied.strategy, STRATEGIES[name])


class Renamed(Layer):
    """Reads what a module with other names has saved."""

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        self.found = super().load_state_dict({"layer." + name.partition(".")[2]: x for name, x in state_dict.items()})
        return self.found


class Named(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.other, self.layer = self.layer, None

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.other(batch).square().mean()


def run_renamed(name: str, directory: Path) -> dict[str, Any]:
    saved = fit(name, Named(), directory, 1)
    read = Renamed()
    make_trainer(STRATEGIES[name]()).validate(read, [torch.ones(1, 4)], ckpt_path=directory / "epoch=0.ckpt")
    return {"equal": torch.equal(whole(read.layer.weight), whole(saved.other.weight)), "found": tuple(read.found)}


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_modules_own_load_state_dict_renames_entries(nursery: Nursery, name: str, tmp_path: Path) -> None:
    for found in Pool(nursery, 2).run(run_renamed, name, tmp_path, trainer=True):
        assert found == {"equal": True, "found": ([], [])}


def fit(strategy: str, module: Layer, directory: Path, epochs: int, resume: Path | None = None) -> Layer:
    saver = ModelCheckpoint(directory, "{epoch}", save_top_k=-1)
    run = make_trainer(STRATEGIES[strategy](), callbacks=[saver], max_epochs=epochs, enable_checkpointing=True)
    run.fit(module, ckpt_path=resume)
    return module


def run_habits(name: str, directory: Path) -> dict[str, Any]:
    fit(name, WithoutOptimizer(), directory / "none", 1)
    fit(name, WithoutOptimizer(), directory / "none", 2, directory / "none/epoch=0.ckpt")
    shown = fit(name, Layer(), directory / "shown", 1)
    again = fit(name, Layer(), directory / "shown", 2, directory / "shown/epoch=0.ckpt")
    fit(name, Averaged(), directory / "averaged", 1)
    skipping = fit(name, Layer(skips=True), directory / "skipped", 1)
    before = whole(skipping.layer.weight)
    skipping.skips = False
    fit(name, skipping, directory / "trained", 1)
    return {
        "none": sorted(path.name for path in (directory / "none").iterdir()),
        "first": sorted(shown.shown),
        "shown": again.shown,
        "averaged": any((directory / "averaged").iterdir()),
        "moved": float((whole(skipping.layer.weight) - before).abs().max()),
    }


def whole(weight: torch.Tensor) -> torch.Tensor:
    return (weight.full_tensor() if isinstance(weight, DTensor) else weight).detach().clone()


@pytest.mark.parametrize("name", STRATEGIES)
def test_habits_of_a_run(nursery: Nursery, name: str, tmp_path: Path) -> None:
    """A module without an optimizer, and one that adds an average of its weights; a last step that trains nothing, and
    then another run; hooks that look at all entries of a checkpoint.
    """
    [found] = Pool(nursery, 1).run(run_habits, name, tmp_path, trainer=True)
    assert found["none"] == ["epoch=0.ckpt", "epoch=1.ckpt"]
    assert found["averaged"]
    assert found["moved"] > 0
    lightning = {"epoch", "global_step", "pytorch-lightning_version", "state_dict", "loops", "callbacks"}
    assert found["shown"] == lightning | {"optimizer_states", "lr_schedulers"}


def prune(name: str) -> str:
    """Runs on each rank: the error of a run with Lightning's pruning."""
    try:
        make_trainer(STRATEGIES[name](), callbacks=[ModelPruning("l1_unstructured", amount=0.5)], max_epochs=1).fit(
            Layer()
        )
    except ValueError as error:
        return str(error)
    return ""


def test_pruning_is_for_whole_tensors(nursery: Nursery) -> None:
    [refused] = Pool(nursery, 1).run(prune, "fsdp2", trainer=True)
    assert "ModelPruning chooses what it prunes by all elements of a tensor, and layer.weight is sharded" in refused
    assert Pool(nursery, 1).run(prune, "ddp", trainer=True) == [""]


class Noised(Recorder):
    """Adds plain noise to gradients, or noise like them."""

    is_plain = True

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        for gradient in (p.grad for p in self.parameters() if p.grad is not None):
            gradient.add_(torch.randn(gradient.shape) if self.is_plain else torch.randn_like(gradient), alpha=1e-3)


def add_noise() -> str:
    module = Noised()
    with pytest.raises(RuntimeError) as caught:
        make_trainer({}, max_steps=1).fit(module, batches(2))
    module.is_plain = False
    make_trainer({}, max_steps=1).fit(module, batches(2))
    return str(caught.value)


def test_plain_noise_on_gradients_is_told_of_noise_like_them(pool2: Pool) -> None:
    for said in pool2.run(add_noise, trainer=True):
        assert said.startswith("a plain tensor goes into a sharded parameter or gradient")
        assert "p.grad.add_(torch.randn_like(p.grad))" in said


# ---- on sharded weights ----------------------------------------------------------------------------------------------


class Watched(Recorder):
    """Keeps the norms that Lightning computes of its gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_llama()
        self.norms: list[dict[str, float]] = []

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        norms = grad_norm(self, norm_type=2)
        self.log_dict(norms)
        self.norms.append({name: float(whole(norm)) for name, norm in norms.items()})


class Noted(StochasticWeightAveraging):
    """A user's subclass with a hook of its own."""

    has_begun = False

    def setup(self, *args: Any, **kwargs: Any) -> None:
        super().setup(*args, **kwargs)
        self.has_begun = True


def fit_watched(strategy: Strategy, tp: int, module: Watched, epochs: int, directory: Path, resume: bool) -> None:
    averaging = Noted(swa_lrs=1e-2, swa_epoch_start=1, annealing_epochs=1)
    saver = ModelCheckpoint(directory, "{epoch}", save_top_k=-1)
    switches = {"detect_anomaly": resume, "enable_checkpointing": True}  # which formats a stack for each operation
    run = make_trainer(strategy, callbacks=[averaging, saver], max_epochs=epochs, **switches)
    run.fit(module, batches(world_size() // tp), ckpt_path=directory / "epoch=1.ckpt" if resume else None)
    assert averaging.has_begun
    assert type(averaging) is Noted
    torch.autograd.set_detect_anomaly(False)


def run_watched(tp: int | None, directory: Path) -> dict[str, Any]:
    """Runs on each rank: a fit, a second one of the same module, and one that resumes the first."""

    def strategy() -> Strategy:
        return SingleDeviceStrategy("cpu") if tp is None else FSDP2TPStrategy(tp=tp)

    module, resumed = Watched(), Watched()
    fit_watched(strategy(), tp or 1, module, 3, directory / "first", resume=False)
    first = whole_parameters(module)
    fit_watched(strategy(), tp or 1, module, 2, directory / "second", resume=False)
    fit_watched(strategy(), tp or 1, resumed, 3, directory / "first", resume=True)
    return {"fits": [first, whole_parameters(module), whole_parameters(resumed)], "norms": module.norms}


@pytest.mark.long  # tests/strategies/test_features.py has averages in every run
@pytest.mark.parametrize("tp", [1, 2])
def test_averages_norms_and_anomalies(nursery: Nursery, tp: int, tmp_path: Path) -> None:
    expected = Pool(nursery, 1).run(run_watched, None, tmp_path / "one", trainer=True)[0]
    actual = Pool(nursery, 2).run(run_watched, tp, tmp_path / "mesh", trainer=True, timeout=120)[0]
    for one, many in zip(expected["norms"], actual["norms"], strict=True):
        assert many == pytest.approx(one, rel=1e-4)
    for one, many in zip(expected["fits"], actual["fits"], strict=True):
        for name, value in one.items():
            torch.testing.assert_close(many[name], value, rtol=1e-4, atol=1e-5)
