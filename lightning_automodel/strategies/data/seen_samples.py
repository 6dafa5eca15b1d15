"""Resumes an epoch behind the samples that were trained on, for loaders that keep no position of their own.

A checkpoint says how many batches of the epoch are through, and what a batch was: samples per data rank, data ranks,
workers. From that follow the samples of all data ranks together, and what is left for other sizes of the same::

    seen = 3 batches x 2 samples x 2 data ranks = 12        order of the epoch: 0 1 2 ... 11 | 12 13 14 15
    now 4 data ranks, 1 sample each                         next batch:         rank 0: 12, rank 1: 13, rank 2: 14, ...

====================================================  ==============================================================
training loader                                       goes on
====================================================  ==============================================================
map-style, with the sampler that the trainer put in   behind the samples, which are not read again
batches of the user's, dealt by the trainer            behind the batches, if they are those of the checkpoint
iterable, divided by the trainer, up to one worker    behind the samples, which are read and dropped
iterable, more workers; an order or a division of     behind as many batches, if batch size, data ranks and workers
the user's own that is the same in every run          are those of the checkpoint; else about there, with a warning
with ``state_dict`` and ``load_state_dict``           where its own state says; behind the samples, as above, if that
                                                      state is a number of batches (``counts_batches``)
what else there is                                    with the first batches, with Lightning's warning
====================================================  ==============================================================
"""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.data import has_iterable_dataset, sized_len
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler

from lightning_automodel._compat.lightning.end_of_batch import end_batch_first
from lightning_automodel._compat.lightning.progress import (
    begin_batch_anew,
    cycles,
    end_epoch,
    go_on_in_epoch,
    has_begun_pass,
    is_stateful,
    position_in_epoch,
    reads_begun_pass,
    set_batches_through,
)
from lightning_automodel._compat.lightning.trainer import uses_distributed_sampler
from lightning_automodel.distributed.logs import warn_once
from lightning_automodel.strategies.data.batches import Batches
from lightning_automodel.strategies.data.passes import describe_passes, load_when_due, make_up_for_passes
from lightning_automodel.strategies.data.positions import (
    POSITIONS,
    holds_one_position,
    warn_of_one_position,
    warn_of_other_ranks,
)
from lightning_automodel.strategies.data.rest_of_epoch import Behind, RestOfOrder, counts_batches, resumed
from lightning_automodel.strategies.data.shared_order import DealtBatches, SharedOrder
from lightning_automodel.strategies.data.stateful import end_pass
from lightning_automodel.strategies.data.streams import divides_itself, share_of_loader

SEEN = "samples_seen"


@dataclass(frozen=True)
class _Rest:
    """The rest of an epoch.

    Attributes:
        loader: of what is left.
        batches: of whole epochs.
        seen: items that are through, if known.
        through: batches that are, of the sizes of this run.
    """

    loader: Any
    batches: Batches
    seen: int | None
    through: int


class SeenSamples:
    """The position of a run in its training data, for checkpoints and from one."""

    def __init__(self) -> None:
        self._saved: Mapping[str, Any] = {}
        self._positions = 0  # data ranks whose loaders have told their states
        self._is_of_one = False  # Lightning keeps those of rank 0
        self._surplus: dict[int, list[int]] = {}  # by epoch and loader: items that whole batches do not account for

    def describe(self, trainer: "pl.Trainer", combined: CombinedLoader | None, data_size: int) -> dict[str, Any]:
        """Describe the loaders for a checkpoint, which keeps the number of batches by itself."""
        loaders = [] if combined is None else combined.flattened
        found = [Batches.of(loader, data_size, cycles(combined)) for loader in loaders]
        surplus = self._surplus.get(position_in_epoch(trainer).epoch, [0] * len(found))
        return {
            "loaders": [batches and asdict(batches) for batches in found],
            "surplus": surplus,
            **describe_passes(trainer, combined),
        }

    def load(self, checkpoint: Mapping[str, Any]) -> None:
        """Keeps what a checkpoint says, for :meth:`go_on`."""
        self._saved = checkpoint.get(SEEN, {})
        self._positions = len(checkpoint.get(POSITIONS, []))
        self._is_of_one = holds_one_position(checkpoint)

    def go_on(self, trainer: "pl.Trainer", combined: CombinedLoader, rank: int, size: int) -> None:
        """Lets the loaders give the rest of the epoch first, then whole ones, and the trainer count accordingly.

        Args:
            trainer: whose loops are those of the checkpoint.
            combined: the training loaders as the trainer has prepared them.
            rank: of this process among the data ranks.
            size: number of data ranks.
        """
        before = [found and Batches(**found) for found in self._saved.get("loaders", [])]
        end_batch_first(trainer)
        begin_batch_anew(trainer)
        go_on_in_epoch(trainer)
        position = position_in_epoch(trainer)
        loaders, limits = combined.flattened, combined.limits or []
        make_up_for_passes(trainer, combined, self._saved, position.epoch)
        is_due = load_when_due(trainer, position, self._saved)
        if not position.batches:
            _begin_epoch(trainer, combined, size, is_due)
            return
        if self._positions not in (0, size):
            warn_of_other_ranks(_with_own_position(loaders), self._positions, size)
        elif self._is_of_one:
            warn_of_one_position(next(filter(is_stateful, loaders), None), size)
        if len(before) != len(loaders):
            return
        rests: dict[int, _Rest] = {}
        for i, (loader, old) in enumerate(zip(loaders, before, strict=True)):
            new = Batches.of(loader, size, cycles(combined))
            if old is not None and new is not None:
                surplus = self._saved["surplus"][i]
                rest = _find_rest(loader, old, new, position.batches, surplus, rank, uses_distributed_sampler(trainer))
                rests.update({i: _counted(*rest, new, limits[i])} if rest is not None else {})
                if rest is not None and counts_batches(loader):
                    _count_anew(loader, rest[0])
        longest = max(rests, key=lambda i: limits[i], default=None)
        through = position.batches if longest is None else rests[longest].through
        self._surplus = {position.epoch: [_surplus(rests.get(i), through) for i in range(len(loaders))]}
        is_known = all(i in rests or is_stateful(loader) for i, loader in enumerate(loaders))
        set_batches_through(trainer, through, is_known)
        combined.flattened = [
            resumed(loader, rests[i].loader, rests[i].through) if i in rests else loader
            for i, loader in enumerate(loaders)
        ]


def _count_anew(*loaders: Any) -> None:
    """Let loaders that count their batches begin at none: what they counted is not there any more."""
    for loader in loaders:
        loader.load_state_dict({"batches": 0})


def warn_of_loaders_ahead(combined: CombinedLoader | None) -> None:
    """Warn of loaders whose own position is behind a batch that a run which resumes begins again."""
    ahead = _with_own_position([] if combined is None else combined.flattened)
    if ahead is not None:
        warn_once(
            f"a checkpoint is saved within a training batch, and the state of {type(ahead).__name__} is behind it: who "
            "resumes does the optimizer step anew, with the samples that follow. Save in on_train_batch_end to "
            "continue exactly"
        )


def _with_own_position(loaders: Iterable[Any]) -> Any:
    """Return the first loader whose state is no number of batches."""
    return next((loader for loader in loaders if is_stateful(loader) and not counts_batches(loader)), None)


def _begin_epoch(trainer: "pl.Trainer", combined: CombinedLoader, data_ranks: int, is_due: bool) -> None:
    """Lets a trainer go on with the first batch of an epoch, of a pass that had begun or of one that begins.

    Args:
        trainer: whose loops are those of the checkpoint.
        combined: its training loaders.
        data_ranks: number of them.
        is_due: the trainer makes other loaders before that batch.
    """
    _count_anew(*filter(counts_batches, combined.flattened))
    for loader in combined.flattened:
        end_pass(loader)
    end_epoch(trainer)
    if is_due or has_begun_pass(trainer):
        first = None if reads_begun_pass(trainer) else ()
        combined.flattened = [
            loader if Batches.of(loader, data_ranks, cycles(combined)) is None else resumed(loader, first)
            for loader in combined.flattened
        ]


def _find_rest(
    loader: DataLoader, old: Batches, new: Batches, through: int, surplus: int, rank: int, is_divided: bool
) -> tuple[Any, int | None, int] | None:
    """Returns a loader of what is left, how many items are through, and about how many batches; ``None`` for orders
    that are not the same again.
    """
    seen = old.items(through)
    if seen is not None:
        seen = _as_items_of(new, old, seen + surplus)
    if seen is not None:
        if has_iterable_dataset(loader):
            if is_divided and not divides_itself(loader.dataset) and max(old.workers, new.workers) < 2:
                return share_of_loader(loader, rank, new.data_ranks, drop_last=True, seen=seen), seen, through
        elif new.items(1) is not None and (sampler := _share(loader, old, new)) is not None:
            return _reordered(loader, RestOfOrder(sampler, seen)), seen, through
    if not has_iterable_dataset(loader) and not isinstance(loader.sampler, DistributedSampler | SequentialSampler):
        return None
    count = _batches_behind(old, new, through, seen)
    return _behind_batches(loader, count), seen, count


def _as_items_of(new: Batches, old: Batches, seen: int) -> int | None:
    """Count ``seen`` items of ``old`` in those of ``new``; ``None`` if unknown."""
    if new.divides_as(old):
        return seen
    of_old, of_new = old.samples_per_item, new.samples_per_item
    return None if of_old is None or of_new is None else seen * of_old // of_new


def _share(loader: DataLoader, old: Batches, new: Batches) -> DistributedSampler | None:
    """Returns the sampler of ``loader`` if it is the trainer's, and divides what it did before."""
    sampler = loader.batch_sampler if isinstance(loader.batch_sampler, DealtBatches) else loader.sampler
    if type(sampler) not in (DistributedSampler, SharedOrder, DealtBatches) or not new.divides_as(old):
        return None
    assert isinstance(sampler, DistributedSampler)
    return sampler if sampler.drop_last and sampler.num_replicas == new.data_ranks else None


def _reordered(loader: DataLoader, sampler: Any) -> DataLoader:
    result = copy.copy(loader)
    batches: Any = loader.batch_sampler
    if isinstance(batches, DealtBatches):
        vars(result).update(batch_sampler=sampler, _iterator=None)
        return result
    if batches is not None:
        batches = BatchSampler(sampler, batches.batch_size, batches.drop_last)
    vars(result).update(sampler=sampler, batch_sampler=batches, _iterator=None)
    return result


def _batches_behind(old: Batches, new: Batches, through: int, seen: int | None) -> int:
    of_one = new.items(1)
    if not new.equals(old):
        warn_once(
            f"the training data of the checkpoint were read as {old}, and now as {new}: their order is "
            "another one, so some samples of this epoch may be seen twice and others not. Resume with the same sizes, "
            "or from the end of an epoch, or use a loader with state_dict and load_state_dict, to continue exactly"
        )
        about = through * old.data_ranks // new.data_ranks
        through = about if seen is None or of_one is None else seen // of_one
    return through % new.length if new.length and new.is_cycled else through


def _behind_batches(loader: DataLoader, count: int) -> Any:
    if has_iterable_dataset(loader):
        return Behind(loader, count)
    result = copy.copy(loader)
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    vars(result).update({name: Behind(getattr(loader, name), count), "_iterator": None})
    return result


def _counted(loader: Any, seen: int | None, through: int, batches: Batches, limit: float) -> _Rest:
    """Count the batches as if the epoch had as many left as ``loader`` has, or as the limit leaves."""
    left, of_one = sized_len(loader), batches.items(1)
    if batches.length is not None and left is not None and limit >= batches.length:
        through = (
            through - through % batches.length + batches.length - left if batches.is_cycled else batches.length - left
        )
    elif seen is not None and of_one is not None:
        through = seen // of_one
    return _Rest(loader, batches, seen, through)


def _surplus(rest: _Rest | None, through: int) -> int:
    counted = None if rest is None else rest.batches.items(through)
    return 0 if rest is None or rest.seen is None or counted is None else rest.seen - counted
