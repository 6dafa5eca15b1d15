"""A rank that vanishes, fails or hangs is an error on every other rank, which names it and the collective."""

import os
import re
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_automodel.strategies.faults import peers
from lightning_automodel.testing.pool import Pool, RankFailed
from tests.support.marks import with_long
from tests.support.training import Recorder, batches, make_trainer, world_size

TIMEOUT = 4.0  # seconds, of collectives
SILENCE = 3.0
LATEST = 2 * (TIMEOUT + 2 * SILENCE)  # twice what it takes on a machine that has nothing else to do


class End(Callback):
    """Ends this process, or its work, on one rank in the second optimizer step, before the hook ``where``.

    A rank that hangs does so until all others have written a file in ``directory``.
    """

    def __init__(self, rank: int, how: str, where: str) -> None:
        self.rank, self.how, self.where = rank, how, where
        self.start = time.monotonic()
        self.directory = Path()

    def _end(self, trainer: L.Trainer, where: str) -> None:
        if trainer.global_step < 1:
            return
        if where == "forward":
            self.start = time.monotonic()
        if trainer.global_rank == self.rank and where == self.where:
            if self.how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "fails":
                raise ValueError("no such token")
            while len(files(self.directory)) < trainer.world_size - 1:
                time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        self._end(trainer, "forward")

    def on_before_backward(self, trainer: L.Trainer, *args: Any) -> None:
        self._end(trainer, "backward")

    def on_before_optimizer_step(self, trainer: L.Trainer, *args: Any) -> None:
        self._end(trainer, "step")


def files(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if path.is_file()]


def train(sizes: dict[str, Any], end: End, directory: Path) -> None:
    """Writes what this rank raises, and how long after the start of the step."""
    peers._BEAT, peers._SILENCE = 0.2, SILENCE
    end.directory = directory
    saver = ModelCheckpoint(directory / "saved", save_on_exception=True)
    trainer = make_trainer(
        {**sizes, "timeout": timedelta(seconds=TIMEOUT)},
        max_epochs=9,
        callbacks=[end, saver],
        enable_checkpointing=True,
        gradient_clip_val=0.5,
    )
    try:
        trainer.fit(Recorder(), batches(world_size() // sizes.get("tp", 1)))
    except RuntimeError as error:
        text = f"{time.monotonic() - end.start}\n{error}"
        (directory / str(trainer.global_rank)).write_text(text)
        raise


CASES = {
    "killed in forward": ({}, End(3, "dies", "forward"), r"rank 3 \(process \d+ on \S+\) is gone"),
    "killed in backward": ({"tp": 2, "async_save": True}, End(0, "dies", "backward"), r"rank 0 \(.*\) is gone"),
    "fails": ({"tp": 2}, End(2, "fails", "step"), r"rank 2 \(.*\) is the one that failed: ValueError: no such token"),
    "hangs": ({"tp": 2}, End(1, "hangs", "forward"), r"no rank is gone, but rank 1 did not come to it within timeout="),
}
"""The layout, what becomes of one rank, and what the error of the others says."""


@pytest.mark.slow
@pytest.mark.parametrize("case", with_long(CASES, "killed in forward", "fails", "hangs"))
def test_the_others_say_who(pool4: Pool, tmp_path: Path, case: str) -> None:
    sizes, end, message = CASES[case]
    with pytest.raises(RankFailed):
        pool4.run(train, sizes, end, tmp_path, trainer=True, grace=LATEST, timeout=60)
    others = [rank for rank in range(4) if rank != end.rank]
    assert sorted(int(path.name) for path in files(tmp_path)) == others
    for rank in others:
        seconds, _, text = (tmp_path / str(rank)).read_text().partition("\n")
        assert re.search(f"over ranks .* failed: {message}", text), text
        assert float(seconds) < LATEST
    assert not list(tmp_path.glob("saved/*"))
