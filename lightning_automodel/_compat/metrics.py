"""Private names of torchmetrics: where a metric collects its states, and which of them are lists."""

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat

_SYNC = "_sync_dist"


def lists_gathered_by_element(metric: Metric) -> dict[str, list[Tensor]]:
    """Return the states of ``metric`` that torchmetrics gathers one element after the other: lists that it does not
    concatenate first. Their names are the same on all ranks.
    """
    of_lists = [name for name, default in metric._defaults.items() if isinstance(default, list)]
    names = [name for name in of_lists if metric._reductions[name] is not dim_zero_cat]
    states = {name: getattr(metric, name) for name in names}
    return {name: state if isinstance(state, list) else [] for name, state in states.items()}


def before_gathering(metric: Metric, act: Callable[[Metric, Callable, Any], None]) -> None:
    """Call ``act(metric, function, group)`` before ``metric`` gathers its states by ``function``.

    A bound method on the instance, found by its name: copies have one of their own, and pickling drops it.
    """
    if _SYNC in vars(metric):
        return

    def _sync_dist(self: Metric, dist_sync_fn: Callable, process_group: Any = None) -> None:
        act(self, dist_sync_fn, process_group or self.process_group)
        type(self)._sync_dist(self, dist_sync_fn, process_group)

    setattr(metric, _SYNC, MethodType(_sync_dist, metric))
