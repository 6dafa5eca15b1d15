"""Private names of Lightning: the counts of a trainer's loops, and the loaders of its training."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning.fabric.utilities.data import _set_sampler_epoch as set_sampler_epoch
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.trainer import Trainer
from lightning.pytorch.utilities.combined_loader import CombinedLoader

__all__ = ["set_sampler_epoch"]  # tells loaders the epoch as the fit loop does; not exported

_COUNTS = ("ready", "started", "processed", "completed")


@dataclass(frozen=True)
class EpochPosition:
    """Where training stands.

    Attributes:
        epoch: that runs, or begins next.
        batches: of it that are through.
    """

    epoch: int
    batches: int


def position_in_epoch(trainer: Trainer) -> EpochPosition:
    """Find where the loops of ``trainer`` stand, or go on if they have been restored."""
    loop = trainer.fit_loop
    epoch: Any = loop.epoch_progress.current
    batch: Any = loop.epoch_loop.batch_progress.current
    is_between_epochs = epoch.started < epoch.ready or epoch.ready == 0
    if is_between_epochs or (loop.is_resuming and not loop.restarting):
        return EpochPosition(epoch.processed, 0)
    through = batch.processed if batch.ready == batch.started == batch.processed else batch.completed
    if loop.epoch_loop.batch_progress.is_last_batch and through == batch.ready:
        return EpochPosition(epoch.ready, 0)
    return EpochPosition(epoch.ready - 1, through)


def has_begun_pass(trainer: Trainer) -> bool:
    """Tell whether the pass that ``trainer`` is about to begin is one that had begun when its checkpoint was saved.

    Lightning begins that of the first epoch before training starts, and one of an epoch that has ended if that was
    saved in its last validation. Behind the last batch, and between epochs, it begins that of the next epoch only.
    """
    epoch: Any = trainer.fit_loop.epoch_progress.current
    progress = trainer.fit_loop.epoch_loop.batch_progress
    batch: Any = progress.current
    if epoch.started < epoch.ready or epoch.ready == 0:
        return epoch.processed == 0
    is_behind_last_batch = progress.is_last_batch and batch.completed < batch.processed
    return epoch.processed < epoch.ready and not is_behind_last_batch


def reads_begun_pass(trainer: Trainer) -> bool:
    """Tell whether batches of a pass that had begun come: not where its epoch is through, and the next pass is read."""
    ready = trainer.fit_loop.epoch_progress.current.ready
    return has_begun_pass(trainer) and position_in_epoch(trainer).epoch < max(ready, 1)


def go_on_in_epoch(trainer: Trainer) -> None:
    """Tells a trainer whose checkpoint was saved by a run that ended within an epoch, or behind it, that it goes on.

    Lightning ends an epoch where ``max_steps``, a callback or a timer ends the run, and saves there, too. Who resumed
    would train its rest under the number of the next one, whose own samples never come, or leave the rest out.
    """
    loop, batch = trainer.fit_loop, trainer.fit_loop.epoch_loop.batch_progress
    epoch: Any = loop.epoch_progress.current
    total: Any = loop.epoch_progress.total
    is_open = len({getattr(batch.current, field) for field in _COUNTS}) == 1 and not batch.is_last_batch
    if not is_open or batch.current.ready == 0 or not epoch.ready == epoch.started == epoch.processed:
        return
    for counts in (epoch, total):
        counts.processed -= 1
        counts.completed = counts.processed
    loop.restarting = True  # asks whether an epoch has begun and not ended


def end_epoch(trainer: Trainer) -> None:
    """Tells a trainer whose checkpoint was saved behind the last batch of an epoch that the epoch has ended.

    Lightning compares the batches that are through with those of an epoch of this run: with more of them (fewer data
    ranks, smaller batches) it would begin the next epoch in its middle. Where the next one was about to begin
    (``on_train_epoch_start``) it would take it for through, and train none of it. Behind the epoch
    (``on_train_epoch_end``, or when the run was over) a run that counts steps would train one batch more of it.
    """
    epoch: Any = trainer.fit_loop.epoch_progress.current
    total: Any = trainer.fit_loop.epoch_progress.total
    progress = trainer.fit_loop.epoch_loop.batch_progress
    if epoch.started < epoch.ready:
        _begin_counts(trainer)
    elif epoch.processed == epoch.ready > 0:
        epoch.completed, total.completed = epoch.processed, total.processed
        # The own setter of the loop takes every run that counts steps for one within an epoch.
        _Loop.restarting.fset(trainer.fit_loop, False)  # type: ignore[attr-defined]
    elif progress.is_last_batch:
        _at_reset(trainer, before=lambda: _count_on(trainer, trainer.num_training_batches - progress.current.ready))


def _begin_counts(trainer: Trainer) -> None:
    """Let the counts of an epoch begin, as the loop does for one that does not go on."""
    loop = trainer.fit_loop.epoch_loop
    for counts in (loop.batch_progress, loop.scheduler_progress, loop.automatic_optimization.optim_progress):
        counts.reset_on_run()
    loop.val_loop.batch_progress.total.reset()


def _count_on(trainer: Trainer, batches: float) -> None:
    if 0 < batches < float("inf"):
        current: Any = trainer.fit_loop.epoch_loop.batch_progress.current
        for field in _COUNTS:
            setattr(current, field, getattr(current, field) + int(batches))


def begin_batch_anew(trainer: Trainer) -> None:
    """Tells a trainer that goes on from within a batch that the run, too, has that batch before it.

    Lightning sets back the batches that have begun in the epoch, and counts on those that have begun in the run
    (``total_batch_idx``): it would validate one batch too early from then on (``check_val_every_n_epoch=None``), and
    find no later checkpoint to be saved behind a batch. Until the loop has reset, it tells by them where it was saved.
    """
    _at_reset(trainer, after=trainer.fit_loop.epoch_loop.batch_progress.total.reset_on_restart)


def _nothing() -> None:
    pass


def _at_reset(
    trainer: Trainer,
    before: Callable[[], None] = _nothing,
    after: Callable[[], None] = _nothing,
    mutes: str | None = None,
) -> None:
    """Calls ``before`` and ``after``, once, around what the loop of an epoch makes of its counts; a warning of it can
    be muted. What was set by an earlier call stays, inside.
    """
    loop = trainer.fit_loop.epoch_loop
    reset = loop.reset

    def prepared() -> None:
        vars(loop).pop("reset", None)
        before()
        with warnings.catch_warnings():
            if mutes is not None:
                warnings.filterwarnings("ignore", mutes)
            reset()
        after()

    vars(loop)["reset"] = prepared


def set_batches_through(trainer: Trainer, through: int, is_known: bool) -> None:
    """Tells a trainer that is about to go on in an epoch how many batches of it are through.

    Args:
        trainer: whose loops have been restored.
        through: batches, of the sizes of this run.
        is_known: its loaders go on behind them, so that Lightning's warning, which knows of loaders with a state only,
            would be wrong.
    """
    loop = trainer.fit_loop.epoch_loop
    batch: Any = loop.batch_progress.current
    done = position_in_epoch(trainer).batches
    for field in _COUNTS:
        setattr(batch, field, getattr(batch, field) + through - done)
    loop.batch_progress.is_last_batch = False  # the last one may have begun, and failed
    if is_known:
        _at_reset(trainer, mutes="You're resuming from a checkpoint that ended before the epoch ended")


def is_within_batch(trainer: Trainer) -> bool:
    """Tell whether a training batch has begun and is not through: a hook or a step saves, or an error ended it."""
    batch: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return batch.processed < batch.ready


def loops_before_step(trainer: Trainer, loops: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry ``loops`` of a checkpoint that is saved within a batch, as if the first micro-batch of that
    optimizer step had just begun::

        steps of 3 micro-batches, saved in the 6th: through 5 -> 3, begun 6 -> 4

    Lightning's says that the 6th goes on, behind gradients of two that no longer stand apart from its own.
    """
    fit: dict[str, Any] = dict(loops["fit_loop"])
    progress = fit["epoch_loop.batch_progress"]
    behind = progress["current"]["processed"] % trainer.accumulate_grad_batches
    counts = {
        kind: {field: progress[kind]["processed"] - behind + (field in ("ready", "started")) for field in _COUNTS}
        for kind in ("total", "current")
    }
    begun = counts["current"]["ready"]
    fit["epoch_loop.batch_progress"] = {**progress, **counts, "is_last_batch": False}
    if begun % trainer.accumulate_grad_batches == 0 or begun >= trainer.num_training_batches:
        state = fit["epoch_loop.state_dict"]  # counts one step more when it is loaded, as behind a batch
        fit["epoch_loop.state_dict"] = {**state, "_batches_that_stepped": state["_batches_that_stepped"] - 1}
    return {**loops, "fit_loop": fit}


def is_stateful(loader: object) -> bool:
    """Tells whether Lightning saves and restores the state of ``loader`` itself."""
    return isinstance(loader, _Stateful)


def before_first_batch(
    trainer: Trainer,
    prepare: Callable[[CombinedLoader], None],
    had_state: Callable[[object], bool] = is_stateful,
) -> None:
    """Calls ``prepare``, once, when the training loaders and their limits are known and none has begun.

    Nothing public lies there; Lightning restores the states of loaders in this place. It refuses a state of a loader
    that has none now: those for which ``had_state`` holds are left out.
    """
    loop = trainer.fit_loop
    restore = loop._load_combined_loader_states

    def prepared() -> None:
        vars(loop).pop("_load_combined_loader_states")
        assert loop._combined_loader is not None
        states = loop._combined_loader_states_to_load
        saved = [loader for loader in loop._combined_loader.flattened if is_stateful(loader) or had_state(loader)]
        if len(saved) == len(states):
            loop._combined_loader_states_to_load = [
                state for loader, state in zip(saved, states, strict=True) if is_stateful(loader)
            ]
        restore()
        prepare(loop._combined_loader)

    vars(loop)["_load_combined_loader_states"] = prepared


def forget_first_batch(trainer: Trainer) -> None:
    """Undoes :func:`before_first_batch`, where a call has failed before it trained."""
    vars(trainer.fit_loop).pop("_load_combined_loader_states", None)


def epochs_of_loading(trainer: Trainer) -> list[int | None]:
    """Return the epochs in which ``trainer`` has asked for its loaders of training, and of the validation within.

    Lightning's checkpoints do not hold them, and a run that resumes asks in other epochs.
    """
    loop = trainer.fit_loop
    epochs = (loop._last_train_dl_reload_epoch, loop.epoch_loop.val_loop._last_val_dl_reload_epoch)
    return [int(epoch) if epoch >= 0 else None for epoch in epochs]


def set_epoch_of_loading(trainer: Trainer, epoch: int) -> None:
    """Lets ``trainer`` have asked for its training loaders in ``epoch``, when it has."""
    loop = trainer.fit_loop
    reset = loop.reset

    def prepared() -> None:
        vars(loop).pop("reset")
        loop._last_train_dl_reload_epoch = epoch
        reset()

    vars(loop)["reset"] = prepared


def before_first_validation(
    trainer: Trainer, prepare: Callable[[CombinedLoader], None], epoch_of_loading: int | None
) -> None:
    """Calls ``prepare``, once, when the validation loaders of training are known and none has begun.

    Args:
        trainer: about to train.
        prepare: from the loaders.
        epoch_of_loading: in which the trainer shall have asked for them, if that is another one.
    """
    loop = trainer.fit_loop.epoch_loop.val_loop
    setup = loop.setup_data

    def prepared() -> None:
        setup()
        if loop._combined_loader is not None:
            vars(loop).pop("setup_data", None)
            prepare(loop._combined_loader)
            if epoch_of_loading is not None:
                loop._last_val_dl_reload_epoch = epoch_of_loading

    vars(loop)["setup_data"] = prepared


def before_each_step(trainer: Trainer, act: Callable[[], None]) -> None:
    """Calls ``act`` before the first micro-batch of each step, before its hooks, until the run ends.

    The hook of a strategy (``on_train_batch_start``) comes behind those of callbacks and of the module.
    """
    loop = trainer.fit_loop.epoch_loop
    advance = loop.advance  # of signals, which end with the run

    def noted(fetcher: Any) -> None:
        current: Any = loop.batch_progress.current
        if current.processed % trainer.accumulate_grad_batches == 0:
            act()
        advance(fetcher)

    vars(loop)["advance"] = noted


def training_loader(trainer: Trainer) -> CombinedLoader | None:
    """Returns the loaders of the training, or ``None`` before they are asked for."""
    return trainer.fit_loop._combined_loader


def validation_loader(trainer: Trainer) -> CombinedLoader | None:
    """Returns the loaders of the validation within training, or ``None`` before they are asked for."""
    return trainer.fit_loop.epoch_loop.val_loop._combined_loader


def cycles(loader: CombinedLoader | None) -> bool:
    """Tells whether loaders that end begin anew until the longest ends."""
    return loader is not None and loader._mode == "max_size_cycle"
