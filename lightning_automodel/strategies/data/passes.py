"""Passes of samplers of users that a run which resumes makes up for, and loaders that it makes anew when due.

Within an epoch, after two others, on a sampler whose order follows from those before::

    checkpoint   passes [0 1 2]   resumes: makes up for [0 1], and goes on in 2

With ``reload_dataloaders_every_n_epochs`` a sampler that is made anew begins at none, and one that is kept goes on.
There, and where workers read, Lightning begins a pass when it has loaded, and another one when the epoch begins.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from lightning_automodel._compat.lightning.progress import (
    EpochPosition,
    before_first_batch,
    before_first_validation,
    epochs_of_loading,
    has_begun_pass,
    set_epoch_of_loading,
    set_sampler_epoch,
    validation_loader,
)
from lightning_automodel.strategies.data.shared_order import order_of

_TRAINING, _VALIDATION, _LOADED = "passes", "validation_passes", "loaded"


def describe_passes(trainer: "pl.Trainer", combined: CombinedLoader | None) -> dict[str, Any]:
    """Describe the passes so far of users' samplers that the trainer shares out, by loader, for a checkpoint, and when
    loaders were made.
    """
    return {
        _TRAINING: _passes_of(combined),
        _VALIDATION: _passes_of(validation_loader(trainer)),
        _LOADED: epochs_of_loading(trainer),
    }


def make_up_for_passes(trainer: "pl.Trainer", combined: CombinedLoader, saved: Mapping[str, Any], epoch: int) -> None:
    """Tells samplers the number of the epoch that goes on, and lets those of users make the passes before it.

    Args:
        trainer: which resumes.
        combined: its training loaders.
        saved: what :func:`describe_passes` has said. What it has not is taken for one pass in each epoch.
        epoch: that the first pass of training is of, which may have begun in the run before.
    """
    every: Any = [[before, True] for before in range(epoch)]
    trained = {id(order.of_user) for order in map(order_of, combined.flattened) if order is not None}

    def make_up(loaders: Iterable[Any], saved: Sequence[list[list[Any]]], ends: bool) -> None:
        for loader, passes in zip_longest(loaders, saved, fillvalue=every):
            goes_on = not ends and bool(passes) and passes[-1][0] == epoch
            if (order := order_of(loader)) is not None and not (ends and id(order.of_user) in trained):
                order.make_up_for(passes[:-1] if goes_on else passes, loader.generator)

    for loader in combined.flattened:
        set_sampler_epoch(loader, epoch)  # now: workers ask for the order before the epoch begins
    make_up(combined.flattened, saved.get(_TRAINING, []), ends=False)
    _, loaded = saved.get(_LOADED, (None, None))
    validation = saved.get(_VALIDATION, [])
    before_first_validation(trainer, lambda found: make_up(found.flattened, validation, ends=True), loaded)


def load_when_due(trainer: "pl.Trainer", position: EpochPosition, saved: Mapping[str, Any]) -> bool:
    """Lets a trainer make its training loaders anew in the epochs in which the run before would have.

    Args:
        trainer: which resumes.
        position: where it goes on.
        saved: what :func:`describe_passes` has said.

    Returns:
        whether that is before the first batch, so that nobody reads what it has now.
    """
    every: int = trainer.reload_dataloaders_every_n_epochs  # type: ignore[attr-defined]
    loaded, _ = saved.get(_LOADED, (None, None))
    if not every or loaded is None:
        return False
    if position.batches:
        loaded = max(loaded, position.epoch - every + 1)  # never in the middle, also with another number
    is_due = not has_begun_pass(trainer) and position.epoch - loaded >= every
    set_epoch_of_loading(trainer, loaded)

    def begin(combined: CombinedLoader) -> None:
        iter(combined)  # as between epochs
        for loader in combined.flattened:
            set_sampler_epoch(loader, position.epoch)

    if is_due:
        before_first_batch(trainer, begin)
    return is_due


def _passes_of(combined: CombinedLoader | None) -> list[list[list[Any]]]:
    orders = [] if combined is None else map(order_of, combined.flattened)
    return [[] if order is None else [list(begun) for begun in order.passes] for order in orders]
