"""SIGTERM and SLURM's signal: all ranks save between two steps and end together; the resumed run goes on exactly."""

import os
import signal
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import TensorDataset

from lightning_automodel.finetuning.loader import ResumableLoader
from lightning_automodel.testing.pool import Nursery, Pool
from tests.support.training import GLOBAL_BATCH, Recorder, make_trainer, rows, world_size

ACCUMULATE = 2
EPOCHS, BATCHES = 2, 8


class Signal(Callback):
    """Sends a signal to this process, on one rank: in the training batch ``count``, or in a validation after it."""

    def __init__(self, rank: int, count: int, number: int = signal.SIGTERM, where: str = "backward") -> None:
        self.rank, self.count, self.number, self.where = rank, count, number, where

    def _send(self, trainer: L.Trainer, where: str) -> None:
        reached = trainer.fit_loop.epoch_loop.total_batch_idx + 1 >= self.count
        if where == self.where and reached and trainer.global_rank == self.rank:
            self.rank = -1
            os.kill(os.getpid(), self.number)

    def on_before_zero_grad(self, trainer: L.Trainer, *args: Any) -> None:
        self._send(trainer, "backward")

    def on_validation_batch_start(
        self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int, *args: Any
    ) -> None:
        self._send(trainer, "validation" if batch_idx < 3 else "validation end")


def train(
    sizes: dict[str, Any],
    directory: Path,
    sender: Signal | None = None,
    *,
    resume: str | None = None,
    save_last: Any = None,
    save_on_exception: bool = False,
    checkpointing: bool = True,
    validate: bool = False,
    **arguments: Any,
) -> dict[str, Any]:
    module = Recorder()
    size = GLOBAL_BATCH // (world_size() // sizes.get("tp", 1))
    data = ResumableLoader(TensorDataset(rows(BATCHES * GLOBAL_BATCH)), batch_size=size, shuffle=True)
    held_out = ResumableLoader(TensorDataset(rows(4 * GLOBAL_BATCH)), batch_size=size)
    saver = ModelCheckpoint(
        dirpath=directory / "saved",
        filename="{step}",
        save_last=save_last,
        save_on_exception=save_on_exception,
        every_n_epochs=EPOCHS,
    )
    callbacks: list[Callback] = [*([saver] if checkpointing else []), *([sender] if sender else [])]
    trainer = make_trainer(
        sizes,
        callbacks=callbacks,
        enable_checkpointing=checkpointing,
        default_root_dir=directory,
        max_epochs=EPOCHS,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=0.5,
        val_check_interval=4,
        limit_val_batches=4 if validate else 0,
        **arguments,
    )
    ended = False
    try:
        trainer.fit(module, data, held_out, ckpt_path=resume)
    except SIGTERMException:
        ended = True
    return {
        "ended": ended,
        "losses": module.losses,
        "step": trainer.global_step,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "has_default_handler": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
        "log_step": trainer.fit_loop.epoch_loop._batches_that_stepped,
    }


CASES = {
    "within an epoch": (Signal(1, 1), None, False, 2),
    "in a validation": (Signal(1, 4, where="validation"), "link", True, 2),
    "after it": (Signal(0, 4, where="validation end"), None, True, 2),
    "after one that ends an epoch": (Signal(1, 8, where="validation end"), True, True, 4),
}
"""Who is signalled when, ``ModelCheckpoint(save_last=...)``, whether it validates, and the step at which it ends."""


@pytest.mark.slow
def test_sigterm_on_one_rank(pool2: Pool, tmp_path: Path) -> None:
    """The first run saves in the background."""
    whole = pool2.run(train, {}, tmp_path / "whole", validate=True, trainer=True)
    for case, (sender, save_last, validate, step) in CASES.items():
        place = {"directory": tmp_path / case, "save_last": save_last, "validate": validate, "trainer": True}
        first = pool2.run(train, {"async_save": True}, sender=sender, **place)
        second = pool2.run(train, {}, resume="hpc" if save_last is None else "last", **place)
        for undisturbed, one, other in zip(whole, first, second, strict=True):
            assert one["ended"], case
            assert one["step"] == step, case
            assert one["has_default_handler"]
            assert not other["ended"]
            assert one["losses"] + other["losses"] == undisturbed["losses"], case
            assert other["log_step"] == undisturbed["log_step"], case
            if validate:
                assert other["metrics"] == undisturbed["metrics"], case


@pytest.mark.slow
def test_what_is_saved(nursery: Nursery, tmp_path: Path) -> None:
    """On one process: by a callback that saves on exceptions, and then only by it; by nobody where nobody saves."""
    alone = Pool(nursery, 1)
    [first] = alone.run(train, {}, tmp_path / "a", Signal(0, 3), save_on_exception=True, trainer=True)
    [second] = alone.run(train, {}, tmp_path / "a", resume=str(tmp_path / "a/saved/step=2.ckpt"), trainer=True)
    [whole] = alone.run(train, {}, tmp_path / "b", trainer=True)
    assert first["losses"] + second["losses"] == whole["losses"]
    assert not list((tmp_path / "a").glob("hpc*"))
    [silent] = alone.run(train, {}, tmp_path / "c", Signal(0, 3), checkpointing=False, trainer=True)
    assert silent["ended"]
    assert not (tmp_path / "c").exists()


def train_on_slurm(directory: Path, sender: Signal | None) -> dict[str, Any]:
    """Lightning asks ``scontrol`` to requeue the job, and resumes from where it saved then."""
    program = directory / "scontrol"
    program.write_text(f"#!/bin/sh\necho $@ >> {directory}/requeued\n")
    program.chmod(0o755)
    rank = os.environ["RANK"]
    os.environ.update(
        SLURM_NTASKS="2",
        SLURM_NTASKS_PER_NODE="2",
        SLURM_JOB_ID="7",
        SLURM_JOB_NAME="job",
        SLURM_PROCID=rank,
        SLURM_LOCALID=rank,
    )
    os.environ.update(SLURM_NODELIST="127.0.0.1", SLURM_NODEID="0", PATH=f"{directory}:{os.environ['PATH']}")
    return train({}, directory, sender, plugins=[SLURMEnvironment()])


@pytest.mark.slow
def test_slurms_signal(pool2: Pool, tmp_path: Path) -> None:
    """The job goes on until SLURM ends it, and the next one from the checkpoint."""
    first = pool2.run(train_on_slurm, tmp_path, Signal(1, 5, signal.SIGUSR1), trainer=True)
    assert not first[0]["ended"]
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    assert [path.name for path in tmp_path.glob("hpc*")] == ["hpc_ckpt_1.ckpt"]
    second = pool2.run(train_on_slurm, tmp_path, None, trainer=True)
    for one, other in zip(first, second, strict=True):
        assert other["losses"] == one["losses"][8:]


def evaluate(stage: str, sender: Signal) -> list[int]:
    seen: list[int] = []

    class Slow(Recorder):
        def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
            seen.append(batch_idx)
            if batch_idx == 1 and self.trainer.global_rank == sender.rank:
                os.kill(os.getpid(), signal.SIGTERM)

        test_step = predict_step = validation_step

    trainer = make_trainer({})
    with pytest.raises(SIGTERMException):
        getattr(trainer, stage)(Slow(), ResumableLoader(TensorDataset(rows(8 * GLOBAL_BATCH)), batch_size=2))
    return seen


@pytest.mark.parametrize("stage", ["validate", "predict"])
def test_sigterm_ends_an_evaluation(pool2: Pool, stage: str) -> None:
    assert pool2.run(evaluate, stage, Signal(1, 0), trainer=True) == [[0, 1, 2]] * 2
