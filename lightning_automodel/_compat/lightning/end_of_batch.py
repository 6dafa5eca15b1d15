"""Private names of Lightning: what follows a batch behind which a checkpoint was saved, which a resume leaves out."""

from typing import Any

from lightning.pytorch.trainer import Trainer


def is_behind_batch(trainer: Trainer) -> bool:
    """Tell whether ``trainer`` is in ``on_train_batch_end``, or was when its checkpoint was saved."""
    batch: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return batch.ready == batch.started == batch.processed == batch.completed + 1


def end_batch_first(trainer: Trainer) -> None:
    """Let a trainer whose checkpoint was saved behind a batch, if it was, go on with what follows that: the validation
    that is due, schedules that monitor, and the end of the epoch behind its last batch.

    Lightning takes all of it for done. Callbacks, schedules, and a sampler that validation and training share, would
    not be where they were in the run before.
    """
    loop = trainer.fit_loop.epoch_loop
    if not is_behind_batch(trainer):
        return
    counts: Any
    for counts in (loop.batch_progress.current, loop.batch_progress.total):
        counts.completed = counts.processed
    advance = loop.advance  # of signals, which end with the run

    def ended(fetcher: Any) -> None:
        if loop.restarting:
            loop.val_loop.restarting = False
        else:
            advance(fetcher)

    vars(loop)["advance"] = ended
