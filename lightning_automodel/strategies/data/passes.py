"""Passes of samplers of users that a run which resumes makes up for, and loaders that it makes anew when due.

Within an epoch, after two others, on a sampler whose order follows from those before::

    checkpoint   passes [0 1 2]   resumes: makes up for [0 1], and goes on in 2

With ``reload_dataloaders_every_n_epochs`` a sampler that is made anew begins at none, and one that is kept goes on.
There, and where workers read, Lightning begins a pass when it has loaded, and another one when the epoch begins.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.seed import isolate_rng

from lightning_automodel._compat.lightning.progress import (
    EpochPosition,
    before_first_batch,
    before_first_validation,
    cycles,
    epochs_of_loading,
    has_begun_pass,
    is_within_batch,
    position_in_epoch,
    set_epoch_of_loading,
    set_sampler_epoch,
    validation_loader,
)
from lightning_automodel.strategies.data.shared_order import SharedOrder, order_of

_TRAINING, _VALIDATION, _LOADED = "passes", "validation_passes", "loaded"


def describe_passes(trainer: "pl.Trainer", combined: CombinedLoader | None) -> dict[str, Any]:
    """Describe the passes so far of users' samplers that the trainer shares out, by loader, for a checkpoint, and when
    loaders were made.
    """
    return {
        _TRAINING: _passes_of(combined, 0 if is_within_batch(trainer) else position_in_epoch(trainer).batches),
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
    for loader in combined.flattened:
        set_sampler_epoch(loader, epoch)  # now: workers ask for the order before the epoch begins
    done = _Done()
    _make_up(combined.flattened, saved.get(_TRAINING, []), epoch, done, goes_on=True)
    _, loaded = saved.get(_LOADED, (None, None))
    validation = saved.get(_VALIDATION, [])
    before_first_validation(trainer, lambda found: _make_up(found.flattened, validation, epoch, done), loaded)


class _Done:
    """What was brought to where the run before was: samplers of users, and generators.

    Training and validation may share them, and training goes on before the first validation comes.
    """

    def __init__(self) -> None:
        self.samplers: list[Any] = []
        self.generators: list[torch.Generator] = []

    @contextmanager
    def leaving_generators(self) -> Iterator[None]:
        """Put the generators that are there already back when passes were made with them."""
        states = [generator.get_state() for generator in self.generators]
        yield
        for generator, state in zip(self.generators, states, strict=True):
            generator.set_state(state)


def _make_up(
    loaders: Iterable[Any], saved: Iterable[Mapping[str, Any]], epoch: int, done: _Done, goes_on: bool = False
) -> None:
    """Makes passes of the samplers of ``loaders``, each once, in their order.

    Args:
        loaders: of training, or of validation.
        saved: what was said of each.
        epoch: that begins, or goes on.
        done: what was brought there before, which is left.
        goes_on: the present passes of that epoch do.
    """
    found = [
        (order, loader, _as_now(said) or {"passes": [[before, True] for before in range(epoch)]})
        for loader, said in zip_longest(loaders, saved)
        if (order := order_of(loader)) is not None and not order.is_told
    ]
    for sampler in {id(order.of_user): order.of_user for order, *_ in found}.values():
        if any(sampler is other for other in done.samplers):
            continue
        done.samplers.append(sampler)
        shares = [share for share in found if share[0].of_user is sampler]
        with done.leaving_generators():
            _make_up_for(shares, epoch if goes_on else None)
        order, _, said = shares[0]
        for generator, state in zip(order.generators(), said.get("now", []), strict=False):
            if not any(generator is other for other in done.generators):
                generator.set_state(state)
                done.generators.append(generator)


def _as_now(said: Any) -> Mapping[str, Any]:
    """Read what :func:`describe_passes` has said of a loader; until November 2026 that was the passes alone."""
    return {"passes": said, "present": len(said) - 1, "states": []} if isinstance(said, list) and said else said


def _make_up_for(shares: list[tuple[SharedOrder, Any, Mapping[str, Any]]], epoch: int | None) -> None:
    """Makes the passes of the sampler of ``shares``, which those of ``epoch`` go on with."""
    first, loader, said = shares[0]
    present = {said.get("present"): (order, said) for order, _, said in shares}
    for number, (of, is_read) in [*enumerate(said["passes"])][len(first.passes) :]:
        with isolate_rng(include_cuda=False):
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)  # as a loader seeds its workers
        if of == epoch and number in present:
            order, its = present[number]
            order.go_on_in(of, is_read, its["states"])
        else:
            begun, items = first.begin(of)
            if is_read:
                first.read(begun, items)


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


def _passes_of(combined: CombinedLoader | None, through: int = 0) -> list[dict[str, Any]]:
    """Describes the passes of loaders, behind ``through`` batches of training: one that begins anew when it has ended
    within an epoch does so with the next batch.
    """
    found = []
    for loader in [] if combined is None else combined.flattened:
        order = order_of(loader)
        found.append({} if order is None else order.describe())
        if found[-1] and through and cycles(combined) and through % max(sized_len(loader) or 0, 1) == 0:
            found[-1]["present"] = None
    return found
