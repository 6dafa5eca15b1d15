"""SIGKILL at random moments of training and saving costs the steps after the last complete checkpoint, and no more.

``make faults`` runs 50 moments with a new seed; ``FAULT_SEED`` repeats one.
"""

import os
import random
import re
import signal
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_automodel.strategies.checkpoints.newest import find_last
from lightning_automodel.testing.pool import Nursery, Pool, RankFailed
from tests.faults.chains import STEPS, Chain, Story, random_kill, train
from tests.support.training import GLOBAL_BATCH, ROWS, make_trainer

MOMENTS = int(os.environ.get("FAULT_MOMENTS", "4"))
SEED = int(os.environ.get("FAULT_SEED", "0"))
LAYOUTS: list[dict[str, Any]] = [
    {"async_save": True},
    {"tp": 2},
    {"tp": 2, "async_save": True},
    {"save_distributed_checkpoint": False},
    {},
]
KILLS_PER_CHAIN = 5


@pytest.mark.long
@pytest.mark.timeout(60 + 20 * MOMENTS)
def test_kills_at_random_moments(pool2: Pool, tmp_path: Path) -> None:
    generator = random.Random(SEED)
    print(f"\nFAULT_SEED={SEED} FAULT_MOMENTS={MOMENTS}")
    kills = 0
    for number in range(-(-MOMENTS // KILLS_PER_CHAIN)):
        arguments = LAYOUTS[number % len(LAYOUTS)]
        whole = reference(pool2, arguments, tmp_path / f"whole {number}")
        chain = Chain(pool2, arguments, tmp_path / str(number), whole.losses)
        chain.directory.mkdir()
        for _ in range(min(KILLS_PER_CHAIN, MOMENTS - kills)):
            kill = random_kill(generator, whole.seconds / KILLS_PER_CHAIN, 2)
            story = chain.run(kill)
            chain.log[-1] += f"; killed {kill.victims} after {kill.seconds:.3f} s"
            kills += not story.ended
        last = chain.run()
        assert last.ended
        assert last.start == STEPS or max(last.losses) == STEPS - 1
        print(f"{arguments}:", *chain.log, sep="\n    ")
    print(f"{kills} kills")
    assert kills >= 0.8 * MOMENTS


class Stop(Callback):
    """Kills all ranks when this run has made so many steps."""

    def __init__(self, steps: int) -> None:
        self.steps, self.first = steps, 0

    def on_train_start(self, trainer: L.Trainer, *args: Any) -> None:
        self.first = trainer.global_step

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step - self.first == self.steps:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.long
def test_a_resume_of_what_was_resumed_at_the_end_of_an_epoch(nursery: Nursery, tmp_path: Path) -> None:
    """Where Lightning would lose count of an epoch, and so train on another order of rows, and one epoch more."""
    alone = Pool(nursery, 1)
    whole = reference(alone, {}, tmp_path / "whole")
    for number, steps in enumerate((ROWS // GLOBAL_BATCH, 1)):
        with pytest.raises(RankFailed):
            alone.run(train, {}, tmp_path, tmp_path / f"journal {number}", Stop(steps), trainer=True)
    alone.run(train, {}, tmp_path, tmp_path / "journal", trainer=True)
    last = Story.read(tmp_path / "journal")
    assert last.start == ROWS // GLOBAL_BATCH + 1
    assert last.losses == {step: loss for step, loss in whole.losses.items() if step >= last.start}


def test_last_is_the_newest_that_is_complete(tmp_path: Path) -> None:
    """A link that leads nowhere, a folder without its last file, weights only, and then nothing at all."""
    for step in (1, 2, 3):
        (tmp_path / f"step={step}.ckpt").mkdir()
        if step < 3:
            (tmp_path / f"step={step}.ckpt" / "meta.pt").touch()
            os.utime(tmp_path / f"step={step}.ckpt" / "meta.pt", (step, step))
    (tmp_path / "last.ckpt").symlink_to("step=3.ckpt")
    for save_last, save_weights_only, expected in (
        ("link", False, "step=2.ckpt"),
        (None, False, "last.ckpt"),
        ("link", True, "last.ckpt"),
    ):
        saver = ModelCheckpoint(tmp_path, save_last=save_last, save_weights_only=save_weights_only)
        trainer = make_trainer({}, callbacks=[saver], enable_checkpointing=True)
        assert find_last(trainer, str(tmp_path / "last.ckpt")) == str(tmp_path / expected)
    (tmp_path / "last.ckpt").unlink()
    (tmp_path / "last.ckpt").symlink_to("step=2.ckpt")
    trainer = make_trainer({}, callbacks=[ModelCheckpoint(tmp_path, save_last="link")], enable_checkpointing=True)
    assert find_last(trainer, str(tmp_path / "last.ckpt")) == str(tmp_path / "last.ckpt")
    trainer = make_trainer({}, callbacks=[ModelCheckpoint(tmp_path / "new", save_last=True)], enable_checkpointing=True)
    assert find_last(trainer, None) is None


@pytest.mark.parametrize("dirpath", ["stays", None])
def test_last_without_a_last_one_tells_of_earlier_runs(tmp_path: Path, dirpath: str | None) -> None:
    """Loggers name a new folder for each run, and ``save_last`` is off unless it is asked for."""
    earlier = tmp_path / (dirpath or "lightning_logs/version_3/checkpoints") / "step=2.ckpt"
    saver = ModelCheckpoint(dirpath and tmp_path / dirpath)
    trainer = make_trainer({}, callbacks=[saver], enable_checkpointing=True, logger=CSVLogger(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_last(trainer, None) is None
    earlier.mkdir(parents=True)
    (earlier / "meta.pt").touch()
    with pytest.warns(
        UserWarning, match="training begins anew; the newest of earlier runs is " + re.escape(f"{earlier}.")
    ):
        assert find_last(trainer, None) is None


def reference(pool: Pool, arguments: dict[str, Any], directory: Path) -> Story:
    directory.mkdir()
    pool.run(train, arguments, directory / "saved", directory / "journal", trainer=True)
    story = Story.read(directory / "journal")
    assert sorted(story.losses) == list(range(STEPS))
    return story
