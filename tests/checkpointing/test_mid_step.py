"""A checkpoint between the micro-batches of an optimizer step, in the middle of an epoch, goes on exactly there."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, StochasticWeightAveraging
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_automodel import DDPStrategy, FSDP2TPStrategy
from lightning_automodel.finetuning.loader import ResumableLoader
from lightning_automodel.testing.pool import Nursery, Pool
from tests.support.marks import with_long
from tests.support.training import (
    GLOBAL_BATCH,
    Descending,
    Recorder,
    SaveAfter,
    largest_difference,
    make_trainer,
    rows,
    whole_parameters,
    world_size,
)

ACCUMULATE = 3
BATCHES = 8  # of an epoch: steps after the batches 3, 6 and 8


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp=2": {"tp": 2},
    "dp_shard=2, one file": {"save_distributed_checkpoint": False},
    "cp=2": {"cp": 2},
    "dp_replicate=2": {"dp_replicate": 2},
    "DDP": {},
    "dp_shard=2 x tp=2": {"tp": 2},
    "one device": {},
}
RANKS = {layout: 4 if " x " in layout else 1 if layout == "one device" else 2 for layout in LAYOUTS}


class AdamRecorder(Recorder):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def run(layout: str, path: Path, save_after: int | None, resume: Path | None, keeps_position: bool) -> dict[str, Any]:
    module = AdamRecorder()
    callbacks = [] if save_after is None else [SaveAfter(path, save_after)]
    sizes = LAYOUTS[layout]
    strategy = DDPStrategy() if layout == "DDP" else FSDP2TPStrategy(**sizes)
    size = GLOBAL_BATCH // (world_size() // sizes.get("tp", 1) // sizes.get("cp", 1))
    kind = ResumableLoader if keeps_position else DataLoader
    loader = kind(TensorDataset(rows(BATCHES * GLOBAL_BATCH)), batch_size=size, shuffle=True)
    settings: dict[str, Any] = {"gradient_clip_val": 0.5, "accumulate_grad_batches": ACCUMULATE, "max_epochs": 2}
    make_trainer(strategy, callbacks=callbacks, **settings).fit(module, loader, ckpt_path=resume)
    return {"losses": module.losses, "draws": module.draws, "parameters": whole_parameters(module)}


def follow(source: str) -> list[str]:
    """All layouts, in a circle from ``source`` on."""
    i = list(LAYOUTS).index(source)
    return [*LAYOUTS, *LAYOUTS][i : i + len(LAYOUTS)]


@pytest.fixture
def pools(nursery: Nursery, pool2: Pool, pool4: Pool) -> dict[int, Pool]:
    return {1: Pool(nursery, 1), 2: pool2, 4: pool4}


@pytest.mark.slow
@pytest.mark.parametrize("source", with_long(LAYOUTS, *list(LAYOUTS)[:6]))
def test_it_goes_on_in_any_layout(pools: dict[int, Pool], tmp_path: Path, source: str) -> None:
    """Two of three micro-batches are through, in the second epoch. Every layout is resumed from two others. Loaders
    keep their position with DDP, and are torch's own elsewhere.
    """
    check(pools, tmp_path, source, follow(source)[:3])


@pytest.mark.long
@pytest.mark.parametrize("source", list(LAYOUTS))
def test_it_goes_on_in_every_other_layout(pools: dict[int, Pool], tmp_path: Path, source: str) -> None:
    check(pools, tmp_path, source, follow(source)[3:])


def check(pools: dict[int, Pool], directory: Path, source: str, targets: list[str]) -> None:
    path = directory / "mid.ckpt"
    count = BATCHES + 5

    def start(layout: str, count: int | None, resume: Path | None) -> dict[str, Any]:
        return pools[RANKS[layout]].run(run, layout, path, count, resume, source == "DDP", trainer=True)[0]

    whole = start(source, count, None)
    for layout in targets:
        again = start(layout, None, path)
        if layout == source and source in ("tp=2", "one device"):
            assert again["losses"] == whole["losses"][count:]
            assert again["draws"] == whole["draws"][count:]
            assert largest_difference(again, whole) == 0
        else:  # the sum of the gradients over data ranks is made in two parts
            assert again["losses"] == pytest.approx(whole["losses"][count:], abs=1e-6), layout
            assert largest_difference(again, whole) < 5e-6, layout


def run_with_torchdata(path: Path, resume: Path | None) -> dict[str, Any]:
    """Each data rank draws its own order."""
    module = AdamRecorder()
    shuffle = torch.Generator().manual_seed(int(os.environ["RANK"]))
    loader = StatefulDataLoader(TensorDataset(rows()), batch_size=2, shuffle=True, generator=shuffle)
    trainer = make_trainer({}, callbacks=[SaveAfter(path, 3)], max_epochs=1, use_distributed_sampler=False)
    trainer.fit(module, loader, ckpt_path=resume)
    return {"losses": module.losses, "parameters": whole_parameters(module)}


@pytest.mark.slow
def test_every_data_rank_has_its_own_position(pool2: Pool, tmp_path: Path) -> None:
    whole = pool2.run(run_with_torchdata, tmp_path / "3.ckpt", None, trainer=True)
    again = pool2.run(run_with_torchdata, tmp_path / "x.ckpt", tmp_path / "3.ckpt", trainer=True)
    for rank in range(2):
        assert again[rank]["losses"] == whole[rank]["losses"][3:]
        assert largest_difference(again[rank], whole[rank]) == 0


# ---- what Lightning's callbacks set when an epoch begins -------------------------------------------------------------

CALLBACKS: dict[str, Callable[[], Callback]] = {
    "steps of more micro-batches": lambda: GradientAccumulationScheduler({0: 2, 1: 4}),
    "averages": lambda: StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=1, annealing_epochs=3),
}


def run_with(name: str, directory: Path) -> list[tuple[list[float], float]]:
    """Runs on each rank: differences from the run that was not stopped, of one resumed within each of its epochs."""
    found = []
    for count in (3, 7):
        results = []
        for resume in (None, directory / f"{count}.ckpt"):
            module, saver = Descending(), SaveAfter(directory / f"{count}.ckpt", count)
            trainer = make_trainer({"tp": 2}, callbacks=[CALLBACKS[name](), *([] if resume else [saver])], max_epochs=3)
            trainer.fit(module, DataLoader(TensorDataset(rows()), batch_size=GLOBAL_BATCH), ckpt_path=resume)
            results.append({"losses": module.losses, "parameters": whole_parameters(module)})
        whole, again = results
        losses = zip(again["losses"], whole["losses"][count:], strict=True)
        found.append(([one - other for one, other in losses], largest_difference(again, whole)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLBACKS)
def test_what_callbacks_set_for_an_epoch(name: str, pool2: Pool, tmp_path: Path) -> None:
    for rank in pool2.run(run_with, name, tmp_path, trainer=True):
        for losses, difference in rank:
            assert not any(losses)
            assert difference == 0


# ---- manual optimization ---------------------------------------------------------------------------------------------


class ByHand(Recorder):
    """One optimizer steps with every batch, the other one accumulates the gradients of two."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        every, second = self.optimizers()  # type: ignore[misc]
        loss = self.loss(batch)
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach().clone())))
        self.manual_backward(loss)
        for optimizer in (every, second) if batch_idx % 2 else (every,):
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        return torch.optim.AdamW(parameters[:4], lr=1e-2), torch.optim.SGD(parameters[4:], lr=0.1)


class InTurns(ByHand):
    """Two optimizers with a backward pass each, in which only their parameters train."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for every, optimizer in enumerate(self.optimizers(), start=2):  # type: ignore[arg-type]
            self.toggle_optimizer(optimizer)
            loss = self.loss(batch)
            self.losses.append(float(self.trainer.strategy.reduce(loss.detach().clone())))
            self.backward_of(loss)
            if batch_idx % every:
                optimizer.step()
                optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def backward_of(self, loss: Tensor) -> None:
        self.manual_backward(loss)


class Plainly(InTurns):
    """Calls ``backward`` of torch."""

    def backward_of(self, loss: Tensor) -> None:
        loss.backward()


def run_by_hand(kind: type[ByHand], directory: Path) -> list[tuple[list[float], list[float], float]]:
    found = []
    for strategy in (lambda: FSDP2TPStrategy(tp=2), DDPStrategy):
        path, results = directory / strategy.__name__, []
        size = GLOBAL_BATCH // (2 if strategy is DDPStrategy else 1)
        for resume in (None, path):
            module = kind()
            trainer = make_trainer(strategy(), callbacks=[] if resume else [SaveAfter(path, 3)], max_epochs=1)
            trainer.fit(module, DataLoader(TensorDataset(rows()), batch_size=size), ckpt_path=resume)
            results.append({"losses": module.losses, "parameters": whole_parameters(module)})
        whole, again = results
        left = whole["losses"][len(whole["losses"]) - len(again["losses"]) :]
        found.append((left, again["losses"], largest_difference(again, whole)))
    return found


@pytest.mark.parametrize("kind", [ByHand, InTurns, Plainly])
def test_gradients_that_wait_for_a_step_by_hand(kind: type[ByHand], pool2: Pool, tmp_path: Path) -> None:
    for rank in pool2.run(run_by_hand, kind, tmp_path, trainer=True):
        for expected, losses, difference in rank:
            assert losses == expected
            assert difference == 0
