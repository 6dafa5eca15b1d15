"""Shows a run as optimizer steps: where it is in the whole run, resumed or not, and the numbers that matter."""

import math
import os
import sys
from importlib.util import find_spec
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar
from typing_extensions import override

from lightning_automodel.callbacks.steps import StepCounter, is_time_to_log, steps_in_all

_SHOWN = {
    "train/loss": ("loss", "{:.4f}"),
    "lr": ("lr", "{:.2e}"),
    "train/gradient_norm": ("norm", "{:.3g}"),
    "train/tokens_per_second": ("tokens/s", "{:,.0f}"),
    "train/mfu": ("MFU", "{:.1%}"),
    "train/peak_memory_gib": ("GiB", "{:.1f}"),
    "train/tokens_seen": ("tokens", "{:,.0f}"),
}


class _StepBar(ProgressBar):
    """What both bars have in common. They read what is logged when it is logged, and not in between: nothing waits."""

    reads_logged_metrics = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._steps, self._text = StepCounter(), dict[str, Any]()

    @property
    @override
    def total_train_batches(self) -> int | float:
        return steps_in_all(self.trainer)

    @override
    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        super().on_train_start(trainer, pl_module)
        self._steps.start(trainer)

    @override
    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._steps.has_stepped(trainer):
            if is_time_to_log(trainer):
                self._read(trainer, pl_module)
            super().on_train_batch_end(trainer, pl_module, outputs, batch, trainer.global_step - 1)

    def get_metrics(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> dict[str, Any]:
        """Return what was shown last; of others that the module wants to see here, too."""
        return self._text

    def _read(self, trainer: "pl.Trainer", module: "pl.LightningModule") -> None:
        logged = trainer.callback_metrics
        text = {short: form.format(float(logged[key])) for key, (short, form) in _SHOWN.items() if key in logged}
        others = super().get_metrics(trainer, module)
        self._text = {**text, **{key: value for key, value in others.items() if key not in _SHOWN and key != "v_num"}}

    def _describe(self, trainer: "pl.Trainer") -> str:
        last = "" if trainer.max_epochs in (None, -1) else f"/{trainer.max_epochs - 1}"
        return f"Epoch {trainer.current_epoch}{last}"


class TQDMStepBar(_StepBar, TQDMProgressBar):
    """Lightning's TQDM bar, over the optimizer steps of the whole run.

    Args:
        refresh_rate: in steps.
    """

    def __init__(self, refresh_rate: int = 1) -> None:
        super().__init__(refresh_rate=refresh_rate)

    @override
    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        super().on_train_start(trainer, pl_module)
        total, bar = self.total_train_batches, self.train_progress_bar
        bar.total = total if math.isfinite(total) else None
        bar.initial = bar.n = trainer.global_step
        bar.set_description(self._describe(trainer))

    @override
    def on_train_epoch_start(self, trainer: "pl.Trainer", *_: Any) -> None:
        self.train_progress_bar.set_description(self._describe(trainer))


class RichStepBar(_StepBar, RichProgressBar):
    """Lightning's Rich bar, over the optimizer steps of the whole run. Needs ``rich``.

    Args:
        refresh_rate: per second.
        console_kwargs: of rich's ``Console``.
    """

    def __init__(self, refresh_rate: int = 10, console_kwargs: dict[str, Any] | None = None) -> None:
        super().__init__(refresh_rate=refresh_rate, console_kwargs=console_kwargs)

    @override
    def on_train_batch_start(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any, batch_idx: int
    ) -> None:
        if self.train_progress_bar_id is None:  # a run that goes on within an epoch does not start one
            self.on_train_epoch_start(trainer, pl_module)
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    @override
    def on_train_epoch_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        if self.is_disabled or self.progress is None:
            return
        if self.train_progress_bar_id is None:
            super().on_train_epoch_start(trainer, pl_module)
        assert self.train_progress_bar_id is not None
        self.progress.update(
            self.train_progress_bar_id, completed=trainer.global_step, description=self._describe(trainer)
        )

    @override
    def _get_train_description(self, current_epoch: int) -> str:
        return self._describe(self.trainer)


def step_bar() -> ProgressBar:
    """Make the bar that suits standard output: Rich on a terminal that can move its cursor, else TQDM."""
    can_move = sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
    return RichStepBar() if can_move and find_spec("rich") is not None else TQDMStepBar(refresh_rate=10)
