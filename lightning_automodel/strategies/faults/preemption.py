"""Ends a run on SIGTERM, and has SLURM requeue one on its signal: on all ranks together, between two optimizer steps.

A signal comes to each process at a time of its own, anywhere between two collectives. The handler only notes it. What
the ranks have noted they exchange at the boundary of each optimizer step (and each batch of an evaluation)::

    boundary n        launch a reduction of the notes         no rank waits
    optimizer step
    boundary n + 1    read it: the same answer on all ranks   -> save, raise SIGTERMException

Lightning broadcasts inside of the handler, where other collectives may be under way, and rank 0's note before each
micro-batch, for which the host waits.
"""

import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Work

from lightning_automodel._compat.lightning.interruption import (
    SignalHandling,
    make_resumable,
    requeue_path,
    save_as_last,
)
from lightning_automodel._compat.lightning.trainer import is_accumulating
from lightning_automodel.distributed.kept_groups import keep

AtOnce = Callable[[], AbstractContextManager[None]]
"""Makes a context within which checkpoints are written when the call returns."""


class Preemption:
    """Notes the signals of this process, and acts on those of all ranks between two steps."""

    def __init__(self) -> None:
        self._trainer: pl.Trainer | None = None
        self._signals: SignalHandling | None = None
        self._notes = SharedNotes()
        self._begin()

    def _begin(self) -> None:
        self._end = self._requeue = False  # what this process was asked for
        self._has_ended = self._has_requeued = False
        self.is_acting = False  # what is saved now is saved for a signal

    def install(self, trainer: "pl.Trainer", at_once: AtOnce, timeout: timedelta | None) -> None:
        """Takes the place of Lightning's handlers, for the run of ``trainer`` that begins.

        Args:
            trainer: whose callbacks save.
            at_once: the strategy's.
            timeout: of the exchange of notes.
        """
        self._begin()
        self._notes.timeout = timeout
        self._trainer, self._at_once = trainer, at_once
        self._signals = SignalHandling(
            trainer, on_end=self._note_end, on_requeue=self._note_requeue, before_batch=self._before_batch
        )

    def remove(self) -> None:
        """Gives the handlers back. A SIGTERM on which the run could not act any more goes to the handler before."""
        if self._signals is None or self._trainer is None:
            return
        self._signals.restore()
        interrupted = self._trainer.state.status == TrainerStatus.INTERRUPTED
        self._notes.close(is_orderly=not interrupted or self._has_ended)
        self._signals = self._trainer = None
        if self._end and not interrupted:
            os.kill(os.getpid(), signal.SIGTERM)

    def check(self) -> None:
        """Acts on signals at a boundary between two steps. Collective: all ranks pass the same boundaries.

        Raises:
            SIGTERMException: on all ranks, if one was asked to end before the last boundary.
        """
        self._act(self._notes.exchange([self._requeue, self._end]))

    def check_finally(self) -> None:
        """Waits for the notes of all ranks at the last boundary of a run. Nothing is saved, since all has been."""
        self._notes.exchange([self._requeue, self._end])
        if self._notes.exchange([False, False])[1]:
            self._raise()

    def _note_end(self, *args: Any) -> None:
        if not self._end:
            self._end = True
            launcher = self._trainer.strategy.launcher if self._trainer is not None else None
            if launcher is not None:
                launcher.kill(signal.SIGTERM)  # to the processes that it has started

    def _note_requeue(self, *args: Any) -> None:
        self._requeue = True

    def _before_batch(self) -> None:
        assert self._trainer is not None
        if not is_accumulating(self._trainer):
            self.check()

    def _act(self, notes: list[bool]) -> None:
        assert self._signals is not None
        requeue, end = notes
        self.is_acting = True
        if requeue and not self._has_requeued:
            self._has_requeued = True
            self._save_and_requeue()
        if end:
            self._save()
            self._raise()
        self.is_acting = False

    def _raise(self) -> None:
        assert self._signals is not None
        self._has_ended = True
        self._signals.tell()
        raise SIGTERMException

    # ---- the checkpoint ----------------------------------------------------------------------------------------------

    def _save_and_requeue(self) -> None:
        assert self._signals is not None
        assert self._trainer is not None
        if self._is_worth_saving():
            undo = make_resumable(self._trainer)
            with self._at_once():
                self._signals.requeue()
            undo()

    def _is_worth_saving(self) -> bool:
        trainer = self._trainer
        assert trainer is not None
        return trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking

    def _save(self) -> None:
        trainer = self._trainer
        assert trainer is not None
        if not self._is_worth_saving():
            return
        step = f"SIGTERM: the run ends after step {trainer.global_step}"
        make_resumable(trainer)
        if any(_saves_on_exception(callback) for callback in trainer.checkpoint_callbacks):
            rank_zero_info(f"{step}; its callbacks save a checkpoint")
            return
        if not trainer.checkpoint_callbacks or getattr(trainer, "fast_dev_run", False):
            rank_zero_info(f"{step}, without a checkpoint: the trainer has no checkpoint callback")
            return
        with self._at_once():
            path, name = self._save_where_found(trainer)
        rank_zero_info(f'{step}; saved {path}. Go on with trainer.fit(..., ckpt_path="{name}")')

    def _save_where_found(self, trainer: "pl.Trainer") -> tuple[str, str]:
        """Saves, and returns the path and the value of ``ckpt_path`` that finds it."""
        callbacks = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
        last = next((c for c in callbacks if c.save_last and not c.save_weights_only), None)
        if last is not None and not SLURMEnvironment.detect():
            return save_as_last(last, trainer), "last"
        path = requeue_path(trainer)  # which SLURM's next job finds without a ckpt_path
        trainer.save_checkpoint(path, weights_only=False)  # said, because Lightning tells if it is not
        return path, "hpc"


def _saves_on_exception(callback: Any) -> bool:
    is_wanted = isinstance(callback, ModelCheckpoint) and callback.save_on_exception
    return is_wanted or isinstance(callback, OnExceptionCheckpoint)


class SharedNotes:
    """Notes (true or false) that each rank makes, and that all ranks read at the same boundary."""

    def __init__(self) -> None:
        self.timeout: timedelta | None = None
        self._group: ProcessGroup | None = None
        self._flight: tuple[Work, Tensor] | None = None

    def exchange(self, notes: list[bool]) -> list[bool]:
        """Gives this rank's ``notes``, and returns which of those given at the call before any rank has made.

        Waits only if another rank has not come to the call before. Collective. Alone, a process reads its own at once.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return notes
        if self._group is None:
            timeout = self.timeout  # beside the other collectives, and on the host
            self._group = keep(("notes", timeout), lambda: dist.new_group(timeout=timeout, backend="gloo"))
        answer = self._land() or [False] * len(notes)
        values = torch.tensor(notes, dtype=torch.uint8, device="cpu")
        work = dist.all_reduce(values, ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        self._flight = work, values
        return answer

    def close(self, is_orderly: bool) -> None:
        """Ends the run; if it is not ``is_orderly``, other ranks may never come to the last call."""
        if self._group is not None and is_orderly:
            self._land()
        self._group = self._flight = None

    def _land(self) -> list[bool] | None:
        if self._flight is None:
            return None
        (work, values), self._flight = self._flight, None
        work.wait()
        return [bool(value) for value in values]
