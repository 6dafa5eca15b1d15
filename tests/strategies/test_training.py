"""Everyday training: optimizers and clipping, several models, callbacks, repeated calls, torch.compile, one device."""

import contextlib
import os
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.spike import TrainingSpikeException
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.callbacks.spike import SpikeDetection
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.model_summary import summarize
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from lightning_automodel import FSDP2TPStrategy
from lightning_automodel.testing.pool import Nursery, Pool
from tests.support.training import (
    HIDDEN,
    Descending,
    Memory,
    Recorder,
    batches,
    fit,
    make_trainer,
    tiny_llama,
    whole,
    whole_parameters,
    world_size,
)


@pytest.fixture
def pool1(nursery: Nursery) -> Pool:
    return Pool(nursery, 1)


# ---- gradients and optimizers ----------------------------------------------------------------------------------------


class Composite(Recorder):
    """Two models of different ties, and a layer beside them."""

    def configure_model(self) -> None:
        if self.model is None:
            self.model, self.other = tiny_llama(), tiny_llama(tied=False)
            torch.manual_seed(1)
            self.head = nn.Linear(HIDDEN, 3)
            self.gradients: list[dict[str, Tensor]] = []

    def loss(self, batch: list[Tensor]) -> Tensor:
        one = self.model(input_ids=batch[0], labels=batch[0], output_hidden_states=True)
        other = self.other(input_ids=batch[0], labels=batch[0])
        return one.loss + 2 * other.loss + self.head(one.hidden_states[-1]).square().mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append({name: whole(p.grad) for name, p in self.named_parameters()})


def gradients_of_composite(tp: int) -> list[dict[str, Tensor]]:
    module = Composite()
    run = make_trainer({"tp": tp}, max_epochs=1, accumulate_grad_batches=2)
    run.fit(module, batches(world_size() // tp))
    return module.gradients


@pytest.mark.slow
def test_several_models_and_a_layer_beside_them(pool1: Pool, pool2: Pool, pool4: Pool) -> None:
    expected = pool1.run(gradients_of_composite, 1, trainer=True)[0]
    for pool in (pool2, pool4):
        actual = pool.run(gradients_of_composite, 2, trainer=True)[0]
        for one, many in zip(expected, actual, strict=True):
            assert one.keys() == many.keys()
            for name, gradient in one.items():
                # Rounding: gradients of k_proj are sums that cancel, up to 2.1e-5 on some processors.
                assert (many[name] - gradient).norm() <= 5e-5 * gradient.norm(), name


class Optimized(Recorder):
    def __init__(self, optimizer: str, **arguments: Any) -> None:
        super().__init__()
        self.make, self.arguments = getattr(torch.optim, optimizer), arguments

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters(), **self.arguments)


OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {"fused": True}),
    ("AdamW", {"foreach": True}),
    ("SGD", {"lr": 0.5, "momentum": 0.9, "foreach": True}),
]


def optimize(tp: int) -> list[dict[str, Tensor]]:
    results = []
    for name, arguments in OPTIMIZERS:
        module = Optimized(name, **arguments)
        run = make_trainer({"tp": tp}, max_epochs=1, gradient_clip_val=0.3)
        run.fit(module, batches(world_size() // tp))
        results.append(whole_parameters(module))
    return results


@pytest.mark.slow
def test_clipping_and_fused_optimizers(pool1: Pool, pool4: Pool) -> None:
    expected, actual = (pool.run(optimize, tp, trainer=True)[0] for pool, tp in ((pool1, 1), (pool4, 2)))
    for optimizer, one, many in zip(OPTIMIZERS, expected, actual, strict=True):
        for name, value in one.items():
            assert (many[name] - value).norm() <= 2e-5 * value.norm(), (optimizer, name)


class HalfSplit(Optimized):
    """Tensor parallelism as Lightning's documentation shows it: some parameters are DTensors and some are not."""

    def configure_model(self) -> None:
        if self.model is None:
            self.model = tiny_llama(tied=False)
            plan = {"lm_head": ColwiseParallel(output_layouts=torch.distributed.tensor.Replicate())}
            parallelize_module(self.model, self.device_mesh["tensor_parallel"], plan)


def optimize_with_lightning(clip: float | None, **arguments: Any) -> str:
    run = make_trainer(ModelParallelStrategy(1, 2), max_steps=1, gradient_clip_val=clip)
    with pytest.raises(RuntimeError) as caught:
        run.fit(HalfSplit("AdamW", **arguments), batches(1))
    return str(caught.value)


def test_lightning_fails_where_tensors_mix(pool2: Pool) -> None:
    assert "mixed" in pool2.run(optimize_with_lightning, 0.3, foreach=False, trainer=True)[0]
    assert "mixed" in pool2.run(optimize_with_lightning, None, fused=True, trainer=True)[0]


class Manual(Recorder):
    """Two optimizers that take turns."""

    automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()[batch_idx % 2]  # type: ignore[index]
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5)
        optimizer.step()
        self.zero_grad()
        return loss

    def configure_optimizers(self) -> Any:
        embedding = self.model.model.embed_tokens.weight
        others = [p for p in self.parameters() if p is not embedding]
        return torch.optim.Adam([embedding], lr=0.1), torch.optim.SGD(others, lr=0.1, momentum=0.9)


def optimize_by_hand(tp: int, directory: Path, resume: Path | None) -> list[float]:
    arguments: dict[str, Any] = {"gradient_clip_val": None, "accumulate_grad_batches": 1}
    return fit({"tp": tp}, directory, epochs=2, module=Manual(), resume=resume, **arguments)[0].losses


def test_several_optimizers_by_hand(pool1: Pool, pool2: Pool, tmp_path: Path) -> None:
    expected = pool1.run(optimize_by_hand, 1, tmp_path / "a", None, trainer=True)[0]
    actual = pool2.run(optimize_by_hand, 2, tmp_path / "b", tmp_path / "a/epoch=0.ckpt", trainer=True)[0]
    assert actual == pytest.approx(expected[4:], abs=1e-6)


# ---- callbacks -------------------------------------------------------------------------------------------------------


def watch(tp: int, directory: Path) -> dict[str, Any]:
    memory = Memory()
    saver = ModelCheckpoint(directory, monitor="val_loss", mode="max", save_top_k=2, save_last=True)
    stopping = EarlyStopping(monitor="val_loss", mode="max", patience=2)  # the loss falls: the first is the best
    callbacks = [saver, stopping, LearningRateMonitor()]
    arguments: dict[str, Any] = {"logger": memory, "log_every_n_steps": 1, "enable_checkpointing": True}
    run = make_trainer({"tp": tp}, max_epochs=9, callbacks=callbacks, **arguments)
    module = Recorder()
    data = world_size() // tp
    run.fit(module, batches(data), batches(data))
    again = Recorder()
    other = make_trainer({"tp": tp}, max_steps=run.global_step + 1, callbacks=[saver], enable_checkpointing=True)
    other.fit(again, batches(data), ckpt_path="last")
    return {
        "epochs": run.current_epoch,
        "kept": {os.path.basename(path) for path in saver.best_k_models},
        "best": os.path.basename(saver.best_model_path),
        "rates": [entry["lr-AdamW"] for entry in memory.logged if "lr-AdamW" in entry],
        "resumed": len(again.losses),
        "parameters": summarize(module).total_parameters,
    }


@pytest.mark.slow
def test_callbacks(pool2: Pool, tmp_path: Path) -> None:
    for tp in (1, 2):
        directory = tmp_path / str(tp)
        results = pool2.run(watch, tp, directory, trainer=True)
        for found in results:
            assert found["epochs"] == 3
            assert found["kept"] == {"epoch=0-step=4.ckpt", "epoch=1-step=8.ckpt"}
            assert found["best"] == "epoch=0-step=4.ckpt"
            assert found["resumed"] == 4 + 1  # Lightning saves "last" when it saves one of the best, here at epoch 1
            assert found["parameters"] == sum(p.numel() for p in tiny_llama().parameters())
        assert results[0]["rates"][:2] == pytest.approx([1e-2 / 3, 1e-2 / 3 + 1e-2 * 2 / 3 / 8])
        assert {path.name for path in directory.iterdir()} == {*results[0]["kept"], "last.ckpt"}


# ---- calls of the trainer --------------------------------------------------------------------------------------------


class Sharded(Recorder):
    """For Lightning's own strategy."""

    def configure_model(self) -> None:
        if self.model is None:
            self.model = fully_shard(tiny_llama(), mesh=self.device_mesh["data_parallel"])


def call_repeatedly(own: bool) -> dict[str, Any]:
    module = Recorder() if own else Sharded()
    run = make_trainer({} if own else ModelParallelStrategy(2, 1), max_epochs=1)
    meshes, plain = [], []
    for call in (run.validate, run.fit, run.test, run.predict) if own else (run.validate, run.test):
        call(module, batches(2))
        meshes.append(id(run.strategy.device_mesh))
        plain.append(sum(not isinstance(p, DTensor) for p in module.parameters()))
    return {"meshes": len(set(meshes)), "plain": plain}


def test_one_mesh_and_shards_after_each_call(pool2: Pool) -> None:
    assert pool2.run(call_repeatedly, True, trainer=True) == [{"meshes": 1, "plain": [0, 0, 0, 0]}] * 2
    lightning = pool2.run(call_repeatedly, False, trainer=True)[0]
    assert all(lightning["plain"])  # the root is left gathered
    assert lightning["meshes"] == 2


def find_rate(sizes: dict[str, Any], directory: Path) -> tuple[list[float], list[float], list[float]]:
    """The losses by which a rate is found; and losses after the search, and without one."""
    losses = []
    loader = batches(world_size() // sizes.get("tp", 1))
    for search in (True, False):
        module = Descending()
        run = make_trainer(sizes, max_epochs=1, default_root_dir=directory)
        if search:
            found = Tuner(run).lr_find(module, loader, num_training=3, update_attr=False)
            assert found is not None
            module.losses.clear()
        run.fit(module, loader)
        losses.append(module.losses)
    return found.results["loss"], *losses


@pytest.mark.long
def test_lr_find(pool1: Pool, pool2: Pool, tmp_path: Path) -> None:
    expected, *_ = pool1.run(find_rate, {}, tmp_path, trainer=True)[0]
    assert len(expected) == 3
    for sizes in ({"tp": 2}, {}):
        for found, after, without in pool2.run(find_rate, sizes, tmp_path, trainer=True):
            assert found == pytest.approx(expected, rel=1e-5)  # Lightning's callback keeps those of rank 0
            assert after == without
    assert list(tmp_path.iterdir()) == []


class Spiking(Descending):
    """Has a loss of 11 times its size in the fourth step, on the first rank alone of two."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        is_spike = self.global_step == 3 and self.trainer.strategy.data_rank == 0
        return super().loss(batch) * (11 if is_spike else 1)


def watch_spikes(rtol: float, directory: Path) -> tuple[float, float, int]:
    """Runs on each rank: what a detector of spikes knows at the end, and the step of that end."""
    detector = SpikeDetection(rtol=rtol, exclude_batches_path=directory / "skipped.json")
    run = make_trainer({}, max_steps=5, callbacks=[detector])
    with contextlib.suppress(TrainingSpikeException):
        run.fit(Spiking(), batches(2))
    return float(detector.running_mean.compute()), float(detector.last_val), run.global_step


@pytest.mark.slow
def test_spikes_are_those_of_the_mean(pool2: Pool, tmp_path: Path) -> None:
    """The mean is 6 times as high as before, the loss of the one rank 11 times."""
    for rtol, last in ((4.0, 4), (8.0, 5)):
        of_ranks = pool2.run(watch_spikes, rtol, tmp_path, trainer=True)
        assert of_ranks[0] == of_ranks[1]
        assert of_ranks[0][2] == last


# ---- torch.compile ---------------------------------------------------------------------------------------------------


class Inside(Recorder):
    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            self.model = torch.compile(self.model)


def fit_plainly(directory: Path) -> list[float]:
    return fit({"tp": 2}, directory, epochs=1)[0].losses


def fit_compiled(which: str, directory: Path) -> dict[str, Any]:
    module = Inside() if which == "inside" else Recorder()
    compiled = torch.compile(module) if which == "outside" else module
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit({"tp": 2, "save_distributed_checkpoint": False}, directory, epochs=1, module=compiled)
    saved = torch.load(directory / "epoch=0.ckpt", weights_only=True)["state_dict"]
    return {
        "losses": module.losses,
        "names": [*saved, *(name for name, _ in module.named_parameters())],
        "warnings": sum("passed through torch.compile" in str(warning.message) for warning in caught),
    }


def refuse_compiled() -> str:
    with pytest.raises(RuntimeError) as caught:
        make_trainer(ModelParallelStrategy(1, 2)).fit(torch.compile(Sharded()), batches(1))
    return str(caught.value)


@pytest.mark.slow
def test_torch_compile(pool2: Pool, tmp_path: Path) -> None:
    expected = pool2.run(fit_plainly, tmp_path / "plain", trainer=True)[0]
    for which in ("inside", "outside"):
        found = pool2.run(fit_compiled, which, tmp_path / which, trainer=True)[0]
        assert found["losses"] == expected
        assert not any("_orig_mod" in name for name in found["names"])
        assert found["warnings"] == 1
    assert "incompatible" in pool2.run(refuse_compiled, trainer=True)[0]


# ---- what a strategy that shards does not do -------------------------------------------------------------------------


def test_synchronized_batch_norms_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sync_batchnorm=True\): FSDP2TPStrategy leaves batch norms as they are"):
        L.Trainer(accelerator="cpu", devices=1, strategy=FSDP2TPStrategy(), sync_batchnorm=True, barebones=True)
