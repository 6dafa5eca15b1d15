"""Writes Chrome traces of chosen steps, a file per rank."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch.profiler import ProfilerActivity, profile

from lightning_automodel.callbacks.sample import StepProfile
from lightning_automodel.callbacks.steps import StepCounter
from lightning_automodel.distributed.logs import log


class TraceProfiler(Callback):
    """Records what hosts and devices do in some optimizer steps, for https://ui.perfetto.dev or chrome://tracing.

    Args:
        first: optimizer step of the run with which it begins, the first one being 1.
        count: steps, all their micro-batches included.
        ranks: that record; ``None``: all.
        dirpath: folder of the files ``steps-10-11-rank-0.json``; ``None``: ``traces`` where the trainer logs.
        shapes: of the tensors of each operation, too.

    Raises:
        ValueError: for steps below 1.
    """

    def __init__(
        self,
        first: int = 10,
        count: int = 2,
        ranks: Sequence[int] | None = None,
        dirpath: str | Path | None = None,
        shapes: bool = False,
    ) -> None:
        super().__init__()
        if first < 1 or count < 1:
            raise ValueError(f"first={first} and count={count} must be at least 1: steps are counted from 1")
        self.first, self.count, self.ranks, self.shapes = first, count, ranks, shapes
        self.dirpath = dirpath
        self._steps = StepCounter()
        self._profile: profile | None = None

    @property
    def _last(self) -> int:
        return self.first + self.count - 1

    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        """Chooses the folder."""
        root = trainer.log_dir or trainer.default_root_dir  # collective: rank 0 knows the version
        self._folder = Path(self.dirpath or Path(root) / "traces")
        self._steps.start(trainer)

    def on_train_batch_start(self, trainer: "pl.Trainer", *_: Any) -> None:
        """Begins with the first micro-batch of the first step."""
        records = self.ranks is None or trainer.global_rank in self.ranks
        if records and self._profile is None and trainer.global_step == self.first - 1:
            StepProfile.abandon()
            kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
            self._profile = profile(activities=kinds, record_shapes=self.shapes)
            self._profile.start()

    def on_train_batch_end(self, trainer: "pl.Trainer", *_: Any) -> None:
        """Writes the file after the last step."""
        if self._steps.has_stepped(trainer) and trainer.global_step >= self._last:
            self._write(trainer.global_rank)

    def on_train_end(self, trainer: "pl.Trainer", *_: Any) -> None:
        """Writes what there is, if the run ends within the steps."""
        self._write(trainer.global_rank)

    def on_exception(self, trainer: "pl.Trainer", *_: Any) -> None:
        """Writes what there is."""
        self._write(trainer.global_rank)

    def _write(self, rank: int) -> None:
        recorded, self._profile = self._profile, None
        if recorded is None:
            return
        recorded.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"steps-{self.first}-{self._last}-rank-{rank}.json"
        recorded.export_chrome_trace(str(path))
        log(f"trace of steps {self.first} to {self._last}: {path}")
