"""Private names of Lightning: what a trainer does on signals, and where an interrupted run is saved and goes on."""

from collections.abc import Callable
from copy import deepcopy
from signal import SIGUSR1
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer import Trainer


class SignalHandling:
    """Takes over what a trainer does on SIGTERM and on SLURM's signal.

    Lightning acts within the handlers, and offers no other way.

    Args:
        trainer: whose next run is meant; the handlers must not be registered yet.
        on_end: handler of SIGTERM.
        on_requeue: handler of the signal by which SLURM announces the end of a job.
        before_batch: called before each training batch is fetched, in place of a broadcast of rank 0's flag.
    """

    def __init__(
        self, trainer: Trainer, *, on_end: Callable, on_requeue: Callable, before_batch: Callable[[], None]
    ) -> None:
        self._connector, self._loop = trainer._signal_connector, trainer.fit_loop.epoch_loop
        self._requeue, advance = self._connector._slurm_sigusr_handler_fn, self._loop.advance

        def checked_advance(fetcher: Any) -> None:
            before_batch()
            advance(fetcher)

        vars(self._connector).update(_sigterm_notifier_fn=on_end, _slurm_sigusr_handler_fn=on_requeue)
        vars(self._loop).update(advance=checked_advance, _broadcast_sigterm_tensor=lambda: None)

    def requeue(self) -> None:
        """Saves, and asks SLURM to start the job again, as Lightning does on SLURM's signal. Collective."""
        self._requeue(SIGUSR1, None)  # type: ignore[arg-type]

    def tell(self) -> None:
        """Set ``trainer.received_sigterm``."""
        self._connector.received_sigterm = True

    def restore(self) -> None:
        """Gives all back; the handlers of before the run are those of the process again."""
        self._connector.teardown()
        for name in ("_sigterm_notifier_fn", "_slurm_sigusr_handler_fn"):
            vars(self._connector).pop(name, None)
        for name in ("advance", "_broadcast_sigterm_tensor"):
            vars(self._loop).pop(name, None)


def requeue_path(trainer: Trainer) -> str:
    """Returns the path to which Lightning saves when SLURM ends a job (``ckpt_path="hpc"``)."""
    return trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir)


def save_as_last(callback: ModelCheckpoint, trainer: Trainer) -> str:
    """Saves what ``ckpt_path="last"`` finds, and returns its path; there is no public call for it. A link to an earlier
    checkpoint is replaced.
    """
    kind, callback.save_last = callback.save_last, True
    try:
        callback._save_last_checkpoint(trainer, callback._monitor_candidates(trainer))
    finally:
        callback.save_last = kind
    return callback.last_model_path


def make_resumable(trainer: Trainer) -> Callable[[], None]:
    """Corrects the trainer's counts for a checkpoint between two training batches, or between two of a validation.

    Lightning itself saves there on exceptions only. Returns a function that undoes it.

    Resumed in a validation, Lightning would go on behind the batches that are through, without what they have added to
    the metrics; now it begins anew. Resumed right after one, or at the start of an epoch, it would count a step twice.
    """
    loop = trainer.fit_loop.epoch_loop
    before = loop._batches_that_stepped, deepcopy(vars(loop.val_loop.batch_progress))
    if trainer.validating:
        progress = loop.val_loop.batch_progress
        through = progress.current.completed
        for tracker in (progress.total, progress.current):
            for field in ("ready", "started", "processed", "completed"):
                setattr(tracker, field, getattr(tracker, field) - through)
        progress.is_last_batch = False
    elif loop._should_check_val_fx(trainer.fit_loop._data_fetcher):  # type: ignore[arg-type]
        loop._batches_that_stepped -= 1

    def undo() -> None:
        loop._batches_that_stepped = before[0]
        vars(loop.val_loop.batch_progress).update(before[1])

    return undo
