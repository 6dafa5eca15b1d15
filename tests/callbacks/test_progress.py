"""The bar counts optimizer steps of the whole run, with accumulation and after a resume within an epoch."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import rich
from lightning.pytorch.callbacks import Callback

from lightning_automodel.callbacks import Health, RichStepBar, Throughput, TQDMStepBar, step_bar
from tests.callbacks.support import saver, train

BARS = {"rich": lambda: RichStepBar(console_kwargs={"file": io.StringIO(), "width": 200}), "tqdm": TQDMStepBar}
STEPS = 4  # of two micro-batches, two epochs


class Look(Callback):
    """Notes where the bar is after every batch, and what it shows."""

    def __init__(self, bar: Any) -> None:
        self.bar, self.seen, self.text = bar, list[tuple[int, float]](), dict[str, str]()

    def on_train_batch_end(self, trainer: "pl.Trainer", *_: Any) -> None:
        if isinstance(self.bar, TQDMStepBar):
            self.seen.append((self.bar.train_progress_bar.n, self.bar.train_progress_bar.total or 0))
        else:
            task = self.bar.progress.tasks[self.bar.train_progress_bar_id]
            self.seen.append((int(task.completed), task.total))
        self.text = self.bar.get_metrics(trainer, trainer.lightning_module)


def show(kind: str, **arguments: Any) -> Look:
    bar = BARS[kind]()
    look = Look(bar)
    callbacks = [Throughput(peak=1e9), Health(), bar, look, *arguments.pop("callbacks", [])]
    train("auto", 1, callbacks, accumulate_grad_batches=2, enable_progress_bar=True, **arguments)
    return look


@pytest.fixture(autouse=True)
def _own_console() -> Iterator[None]:
    """Lightning changes the console of the process, on which others print."""
    yield
    rich.reconfigure()


@pytest.mark.parametrize("kind", BARS)
def test_steps_and_numbers(kind: str, tmp_path: Path) -> None:
    keep: Any = {"enable_checkpointing": True, "callbacks": [saver(tmp_path, 3)]}
    look = show(kind, max_epochs=2, **keep)
    assert look.seen == [(n, STEPS) for n in (0, 1, 1, 2, 2, 3, 3, 4)]
    assert list(look.text) == ["loss", "norm", "tokens/s", "MFU", "GiB", "tokens"]
    resumed = show(kind, max_epochs=2, ckpt_path=tmp_path / "step=3.ckpt")
    assert resumed.seen == [(3, STEPS), (4, STEPS)]  # within the second epoch


def test_a_terminal_sees_no_bar_before_the_run_is_told_and_no_epochs_that_are_not_known() -> None:
    screen = io.StringIO()
    bar = RichStepBar(console_kwargs={"file": screen, "force_terminal": True, "width": 200})
    drawn: list[str] = []

    class Told(Callback):
        def on_train_epoch_start(self, *_: Any) -> None:  # the strategy tells the run before
            drawn.append(screen.getvalue())

    train("auto", 1, [Told(), bar], enable_progress_bar=True, max_epochs=None, max_steps=2)
    assert "Epoch" not in drawn[0]
    assert "Epoch 0 " in screen.getvalue()
    assert "Epoch 0/" not in screen.getvalue()


def test_a_file_gets_the_plain_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(step_bar(), TQDMStepBar)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert isinstance(step_bar(), RichStepBar)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(step_bar(), TQDMStepBar)
