"""A checkpoint that is saved within a batch (by a hook, by an error): its optimizer step is done anew, nothing else."""

import io
import logging
import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn

from lightning_automodel.distributed.logs import logger
from lightning_automodel.testing.pool import Pool
from tests.support.layouts import LAYOUTS
from tests.support.marks import with_long
from tests.support.training import (
    Descending,
    Memory,
    SaveAfter,
    batches,
    largest_difference,
    make_trainer,
    whole_parameters,
)

ROWS = 24  # 6 batches of an epoch: two steps of three micro-batches


class Steps(Memory):
    """Keeps the steps of what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int | None] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.steps.append(step)


class Stopped(Descending):
    """Ends, or saves, in one micro-batch: when it begins, in its backward pass, before its step, or behind."""

    def __init__(self, place: str = "", count: int = 0, path: Path | None = None) -> None:
        super().__init__()
        self.stop, self.path, self.count = (place, count), path, 0

    def configure_model(self) -> None:
        super().configure_model()
        if self.stop[0] == "backward":
            self.model.model.layers[0].mlp.register_full_backward_hook(self.in_backward)

    def in_backward(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self.reach("backward")

    def reach(self, place: str) -> None:
        if (place, self.count) == self.stop:
            if self.path is None:
                raise ArithmeticError(place)
            self.trainer.save_checkpoint(self.path)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.count += 1
        self.reach("start")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.reach("step")

    def on_train_batch_end(self, *args: Any) -> None:
        self.reach("end")


def fit(layout: str, module: Stopped, resume: Path | None = None, *callbacks: Any) -> tuple[dict[str, Any], Steps]:
    steps = Steps()
    settings: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": 3, "log_every_n_steps": 1}
    trainer = make_trainer(
        LAYOUTS[layout].make(),
        callbacks=list(callbacks),
        logger=steps,
        enable_checkpointing=bool(callbacks),
        **settings,
    )
    trainer.fit(module, batches(LAYOUTS[layout].data_size, ROWS, shuffle=True), ckpt_path=resume)
    return {"losses": module.losses, "parameters": whole_parameters(module) if layout[0] != "m" else {}}, steps


def stop_and_go_on(layout: str, place: str, count: int, saves: bool, directory: Path) -> dict[str, Any]:
    """Runs on each rank."""
    whole, steps = fit(layout, Stopped())
    path = directory / "step=1.ckpt"
    if saves:
        fit(layout, Stopped(place, count, path))
    else:
        saver = ModelCheckpoint(directory, "{step}", save_on_exception=True, every_n_epochs=9)
        with pytest.raises(ArithmeticError, match=place):
            fit(layout, Stopped(place, count), None, saver)
    again, more = fit(layout, Stopped(), path)
    difference = largest_difference(again, whole) if again["parameters"] else 0.0
    return {"expected": whole["losses"][3:], "losses": again["losses"], "steps": (steps.steps[1:], more.steps)} | {
        "difference": difference
    }


CASES = [
    ("fsdp2-tp2", "start", 5, True),
    ("fsdp2-dp2", "backward", 5, False),
    ("megatron3-dp2", "end", 5, False),
    ("megatron3-dp2", "start", 6, False),
    ("fsdp2-dp2", "start", 6, False),
    ("ddp-2", "backward", 6, False),
    ("ddp-2", "step", 6, True),
    ("megatron3-dp2", "start", 5, True),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "place", "count", "saves"),
    with_long(CASES, *CASES[3:]),
)
def test_the_step_is_done_anew(pool2: Pool, tmp_path: Path, layout: str, place: str, count: int, saves: bool) -> None:
    for found in pool2.run(stop_and_go_on, layout, place, count, saves, tmp_path, trainer=True):
        assert found["losses"] == pytest.approx(found["expected"], abs=1e-6)
        assert found["difference"] < 1e-6
        assert found["steps"][0] == found["steps"][1]


class Preempted(Descending):
    """Is asked to end in a validation between two micro-batches of a step."""

    asked = False

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        if self.asked and batch_idx == 0:
            self.asked = False
            os.kill(os.getpid(), signal.SIGTERM)


def preempt_and_go_on(directory: Path) -> list[list[float]]:
    """Runs on each rank."""
    losses = []
    for name in ("whole", "asked", "again"):
        module, saver = Preempted(), ModelCheckpoint(directory / name[0], save_last=True, every_n_epochs=9)
        module.asked = name == "asked"
        settings: dict[str, Any] = {"max_epochs": 1, "accumulate_grad_batches": 2, "val_check_interval": 3}
        trainer = make_trainer(
            LAYOUTS["megatron3-dp2"].make(), enable_checkpointing=True, callbacks=[saver], **settings
        )
        with pytest.raises(SIGTERMException) if module.asked else nullcontext():
            trainer.fit(module, batches(2, ROWS), batches(2), ckpt_path="last" if name == "again" else None)
        losses.append(module.losses)
    return losses


@pytest.mark.slow
def test_a_signal_between_micro_batches(pool2: Pool, tmp_path: Path) -> None:
    for whole, asked, again in pool2.run(preempt_and_go_on, tmp_path, trainer=True):
        assert asked == whole[:3]
        assert again == whole[2:]


class BehindStep(Stopped):
    """Fails, or saves, when its optimizer has stepped and the batch is not through."""

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.reach("stepped")


def stop_behind_step(layout: str, directory: Path) -> tuple[str, str, bool]:
    """Runs on each rank: what a save by hand is told, and what the log says of one that an error made."""
    logs, path = io.StringIO(), directory / "hand.ckpt"
    handler = logging.StreamHandler(logs)
    logger.addHandler(handler)
    with pytest.raises(ValueError, match="step taken twice") as refused:
        fit(layout, BehindStep("stepped", 6, path))
    with pytest.raises(ArithmeticError):
        fit(layout, BehindStep("stepped", 6), None, OnExceptionCheckpoint(directory, "error"))
    logger.removeHandler(handler)
    return str(refused.value), logs.getvalue(), path.exists()


def test_behind_the_step_it_is_told_that_it_is_not_exact(pool2: Pool, tmp_path: Path) -> None:
    for refused, logged, was_saved in pool2.run(stop_behind_step, "fsdp2-dp2", tmp_path, trainer=True):
        assert "hand.ckpt" in refused
        assert "on_train_batch_end" in refused
        assert not was_saved
        assert "error.ckpt would have that step taken twice" in logged


class Validating(Stopped):
    """Keeps where it trains and validates: batches of the whole run."""

    def __init__(self, place: str = "", count: int = 0, path: Path | None = None) -> None:
        super().__init__(place, count, path)
        self.trained: list[int] = []
        self.validated: list[int] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.trained.append(self.trainer.fit_loop.total_batch_idx)
        return super().training_step(batch, batch_idx)

    def on_validation_start(self) -> None:
        self.validated.append(self.trainer.fit_loop.total_batch_idx)


def validate(layout: str, module: Validating, resume: Path | None = None, *callbacks: Any) -> Validating:
    trainer = make_trainer(
        LAYOUTS[layout].make(),
        callbacks=list(callbacks),
        enable_checkpointing=bool(callbacks),
        max_epochs=2,
        accumulate_grad_batches=3,
        check_val_every_n_epoch=None,
        val_check_interval=4,
    )
    data = [batches(LAYOUTS[layout].data_size, count, shuffle=count == ROWS) for count in (ROWS, 4)]
    trainer.fit(module, *data, ckpt_path=resume)
    return module


def validate_and_go_on(layout: str, place: str, count: int, directory: Path) -> list[dict[str, Any]]:
    """Runs on each rank: saves within a batch, goes on, saves behind a later batch, and goes on from there."""
    whole = validate(layout, Validating())
    validate(layout, Validating(place, count, directory / "within.ckpt"))
    behind = SaveAfter(directory / "behind.ckpt", 9)
    again = validate(layout, Validating(), directory / "within.ckpt", behind)
    last = validate(layout, Validating(), directory / "behind.ckpt")
    return [{"batches": m.trained, "validated": m.validated, "losses": m.losses} for m in (whole, again, last)]


WITHIN = [("fsdp2-dp2", "start", 5), ("ddp-2", "step", 6), ("fsdp2-tp2", "start", 8)]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "place", "count"), with_long(WITHIN, *WITHIN[1:]))
def test_batches_of_the_run_are_counted_once(pool2: Pool, tmp_path: Path, layout: str, place: str, count: int) -> None:
    """By Lightning's ``total_batch_idx``, which tells when to validate, and how far a batch was when it was saved."""
    for whole, again, last in pool2.run(validate_and_go_on, layout, place, count, tmp_path, trainer=True):
        assert whole["batches"] == list(range(12))
        assert whole["validated"] == [3, 7, 11]
        first = (count - 1) // 3 * 3
        for found, begins in ((again, first), (last, 9)):
            assert found["batches"] == whole["batches"][begins:]
            assert found["validated"] == [at for at in whole["validated"] if at >= begins]
            assert found["losses"] == pytest.approx(whole["losses"][begins:], abs=1e-6)
