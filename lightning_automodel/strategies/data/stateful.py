"""Loaders of torchdata, whose states say less than a checkpoint of this package, or are read twice.

Over an order of samples, or a stream that has no state, a state is a place in what one rank reads. In a run that
resumes that order is another one, since the loader is told the epoch behind its state; and asking for a state begins a
pass, which draws. Without it, such a loader goes on as one of torch's does. Over a stream that has a state it keeps its
own, but of a pass that is through: torchdata would give none of the next one.
"""

import copy
import sys
from collections.abc import Iterator
from typing import Any

from lightning.fabric.utilities.data import has_iterable_dataset, sized_len
from torch.utils.data import BatchSampler, DataLoader

from lightning_automodel._compat.datasets import forget_starting_state
from lightning_automodel.strategies.data.rest_of_epoch import with_class
from lightning_automodel.strategies.data.shared_order import is_of_trainer

_MODULE = "torchdata.stateful_dataloader"


def draws_as_torch(sampler: object) -> bool:
    """Tell whether ``sampler`` is torchdata's, which its loader has in the place of torch's ``RandomSampler``."""
    kind: Any = getattr(sys.modules.get(f"{_MODULE}.sampler"), "RandomSampler", None)
    return kind is not None and type(sampler) is kind


class _WithoutState(DataLoader):
    state_dict = load_state_dict = None


class _OverStateful(DataLoader):
    next_iter_state: Any  # of torchdata: what the next pass begins with
    _is_limited = False
    _before: Any = None  # the state before the last batch, which waits while the one before is trained on

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if self.next_iter_state is None:
            forget_starting_state(self.dataset)
        self._before = None
        batches = super().__iter__()
        has_length = self._is_limited or sized_len(self) is not None
        return batches if has_length else self._read_ahead(batches)

    def _read_ahead(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Give ``batches`` to Lightning's loop, which fetches one ahead where it knows no length."""
        self._before = self._now()
        for batch in batches:
            yield batch
            self._before = self._now()
        self._before = None

    def _now(self) -> Any:
        return super().state_dict()  # type: ignore[misc]

    def state_dict(self) -> Any:
        return self._now() if self._before is None else self._before


def with_what_state_says(loader: DataLoader, is_limited: bool = False) -> DataLoader:
    """Return ``loader``, or one of torchdata's in another form: without a state, if that says no more than how much was
    read; or, over a stream that has one, with passes behind the first that begin at its beginning.

    Args:
        loader: of training.
        is_limited: the trainer takes a number of batches of an epoch, so that no length is unknown.
    """
    if not _is_of_torchdata(loader):
        return loader
    result, batches = copy.copy(loader), loader.batch_sampler
    if isinstance(batches, BatchSampler) and type(batches).__module__.startswith(_MODULE):
        vars(result).update(batch_sampler=BatchSampler(batches.sampler, batches.batch_size, batches.drop_last))
    if hasattr(loader.dataset, "state_dict"):
        if not has_iterable_dataset(loader):
            return loader
        vars(result).update(_is_limited=is_limited)
        return with_class(result, _OverStateful)
    is_counted = has_iterable_dataset(loader) or is_of_trainer(getattr(batches, "sampler", loader.sampler))
    return with_class(result, _WithoutState) if is_counted else loader


def had_state(loader: object) -> bool:
    """Tell whether :func:`with_what_state_says` has taken it: checkpoints of other strategies may hold one."""
    return isinstance(loader, _WithoutState)


def end_pass(loader: object) -> None:
    """Let what a state says of a pass that is through lie behind ``loader``, if that is torchdata's, with a state."""
    if _is_of_torchdata(loader) and not had_state(loader):
        next(iter(loader), None)  # type: ignore[call-overload]


def _is_of_torchdata(loader: object) -> bool:
    kind: Any = getattr(sys.modules.get(_MODULE), "StatefulDataLoader", None)
    return kind is not None and isinstance(loader, kind)
