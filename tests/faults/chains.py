"""A training that is killed again and again, each time at a random moment, and goes on from what is left."""

import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor
from torch.utils.data import TensorDataset

from lightning_automodel.finetuning.loader import ResumableLoader
from lightning_automodel.testing.pool import Pool, RankFailed
from tests.support.training import GLOBAL_BATCH, ROWS, Recorder, make_trainer, rows, world_size

EPOCHS = 6
STEPS = EPOCHS * ROWS // GLOBAL_BATCH


class Journal(Callback):
    """Writes how far rank 0 has come: lines of a word, the step and the time, which outlive the process."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def note(self, trainer: L.Trainer, word: str, *values: Any) -> None:
        if trainer.global_rank == 0:
            with self.path.open("a", buffering=1) as file:
                file.write(" ".join(map(str, [word, trainer.global_step, time.monotonic(), *values])) + "\n")

    def on_train_start(self, trainer: L.Trainer, *args: Any) -> None:
        self.note(trainer, "start", os.getpid())

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        self.note(trainer, "begin")

    def on_fit_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.note(trainer, "end")


class Writer(Recorder):
    """Writes the loss of each step into the journal."""

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self.journal = journal

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.journal.note(self.trainer, "loss", self.losses[-1].hex())
        return loss


def train(arguments: dict[str, Any], directory: Path, journal: Path, *callbacks: Callback) -> None:
    """A run as the documentation recommends it: it saves after every step, and starts from the last checkpoint."""
    journal_ = Journal(journal)
    saver = ModelCheckpoint(directory, filename="{step}", every_n_train_steps=1, save_last="link")
    size = GLOBAL_BATCH // (world_size() // arguments.get("tp", 1))
    data = ResumableLoader(TensorDataset(rows()), batch_size=size, shuffle=True)
    callbacks = (journal_, *callbacks, saver)
    trainer = make_trainer(arguments, max_epochs=EPOCHS, callbacks=list(callbacks), enable_checkpointing=True)
    trainer.fit(Writer(journal_), data, ckpt_path="last")


@dataclass
class Story:
    """What a journal says.

    Attributes:
        start: the step that the run started from; ``None`` if it did not come so far.
        process: of rank 0.
        begun: the last step that was begun.
        losses: of each step that it has come to.
        ended: whether it came to its end.
        seconds: from the first to the last line.
    """

    start: int | None = None
    process: int = 0
    begun: int = 0
    losses: dict[int, str] = field(default_factory=dict)
    ended: bool = False
    seconds: float = 0.0

    @classmethod
    def read(cls, path: Path) -> "Story":
        story, times = cls(), []
        for line in path.read_text().splitlines() if path.exists() else []:
            word, step, moment, *values = line.split()
            times.append(float(moment))
            if word == "start":
                story.start, story.process = int(step), int(values[0])
            elif word == "begin":
                story.begun = int(step)
            elif word == "loss":
                story.losses[int(step)] = values[0]
            story.ended |= word == "end"
        story.seconds = times[-1] - times[0] if times else 0.0
        return story


@dataclass
class Chain:
    """Runs that follow each other in one folder.

    Attributes:
        pool: of the ranks.
        arguments: of the strategy.
        directory: of the checkpoints and the journals.
        reference: the losses of a run that was not disturbed.
        saved: the step whose checkpoint is known to be complete.
        log: a line for every run.
    """

    pool: Pool
    arguments: dict[str, Any]
    directory: Path
    reference: dict[int, str]
    saved: int = 0
    runs: int = 0
    log: list[str] = field(default_factory=list)

    def run(self, disturb: Callable[[Path, list[int]], None] | None = None) -> Story:
        """Starts the run, and judges what it has done; the error of a run that was disturbed is expected."""
        self.runs += 1
        journal = self.directory / f"journal {self.runs}"
        wrapped = None if disturb is None else lambda pids: disturb(journal, pids)
        try:
            self.pool.run(train, self.arguments, self.directory / "saved", journal, trainer=True, disturb=wrapped)
        except RankFailed as error:
            if disturb is None or "ended by SIGKILL" not in str(error.failures):
                raise
        story = Story.read(journal)
        self._judge(story)
        return story

    def _judge(self, story: Story) -> None:
        self.log.append(f"run {self.runs}: from step {story.start} to {story.begun}, complete before: {self.saved}")
        if story.start is None:
            return
        assert story.start >= self.saved, self.log
        assert sorted(story.losses) == list(range(story.start, story.start + len(story.losses))), self.log
        assert story.losses == {step: self.reference.get(step) for step in story.losses}, self.log
        in_flight = 1 if self.arguments.get("async_save") else 0
        self.saved = max(self.saved, story.start, story.begun - in_flight)


@dataclass
class Kill:
    """Kills some ranks some time after the training has started."""

    seconds: float
    victims: list[int]

    def __call__(self, journal: Path, pids: list[int]) -> None:
        end = time.monotonic() + 30
        while not journal.exists() and time.monotonic() < end:
            time.sleep(0.002)
        time.sleep(self.seconds)
        for rank in self.victims:
            with suppress(ProcessLookupError):
                os.kill(pids[rank], signal.SIGKILL)


def random_kill(generator: random.Random, seconds: float, size: int) -> Kill:
    """One rank or all, within so many ``seconds``."""
    one = [generator.randrange(size)]
    return Kill(generator.uniform(0, seconds), generator.choice([one, list(range(size))]))
