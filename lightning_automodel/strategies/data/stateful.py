"""Loaders of torchdata whose state says less than a checkpoint of this package: a place in one rank's order.

That order is another one in a run that resumes, since the loader is told the epoch behind its state; at the end of an
epoch the state leaves out the next one; and asking for it begins a pass, which draws. Lightning's own strategies resume
so. A loader without it goes on as one of torch's does.
"""

import copy
import sys
from typing import Any

from lightning.fabric.utilities.data import has_iterable_dataset
from torch.utils.data import BatchSampler, DataLoader

from lightning_automodel.strategies.data.rest_of_epoch import with_class
from lightning_automodel.strategies.data.shared_order import is_of_trainer

_MODULE = "torchdata.stateful_dataloader"


def draws_as_torch(sampler: object) -> bool:
    """Tell whether ``sampler`` is torchdata's, which its loader has in the place of torch's ``RandomSampler``."""
    kind: Any = getattr(sys.modules.get(f"{_MODULE}.sampler"), "RandomSampler", None)
    return kind is not None and type(sampler) is kind


class _WithoutState(DataLoader):
    state_dict = load_state_dict = None


def without_needless_state(loader: DataLoader) -> DataLoader:
    """Return ``loader``, or one that has no state if that of torchdata says no more than how much of the trainer's
    sampler was read.
    """
    if not _says_a_place_in_an_order(loader):
        return loader
    result, batches = copy.copy(loader), loader.batch_sampler
    if isinstance(batches, BatchSampler) and type(batches).__module__.startswith(_MODULE):
        vars(result).update(batch_sampler=BatchSampler(batches.sampler, batches.batch_size, batches.drop_last))
    return with_class(result, _WithoutState)


def had_state(loader: object) -> bool:
    """Tell whether :func:`without_needless_state` has taken it: checkpoints of other strategies may hold one."""
    return isinstance(loader, _WithoutState)


def _says_a_place_in_an_order(loader: DataLoader) -> bool:
    kind: Any = getattr(sys.modules.get(_MODULE), "StatefulDataLoader", None)
    if kind is None or not isinstance(loader, kind) or type(loader).state_dict is not kind.state_dict:
        return False
    is_ordered = is_of_trainer(getattr(loader.batch_sampler, "sampler", loader.sampler))
    return is_ordered and not has_iterable_dataset(loader) and not hasattr(loader.dataset, "state_dict")
