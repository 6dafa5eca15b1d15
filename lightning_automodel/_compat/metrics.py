"""Private names of torchmetrics: where a metric collects its states, and which of them are lists."""

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat, dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum

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


def saved_states(metric: Metric) -> list[str]:
    """Return the names of the states that ``metric`` puts into a checkpoint (``persistent(True)``)."""
    return [name for name in metric._defaults if metric._persistent[name]]


def combine_states(metric: Metric) -> None:
    """Give ``metric`` the states of all ranks, in the form of its own, until :func:`use_own_states`.
    Collective.

    States that a function of the user's combines, or that are stacked, stay its own.
    """
    metric.sync(dist_sync_fn=metric.dist_sync_fn, distributed_available=lambda: True)
    assert metric._cache is not None
    for name, default in metric._defaults.items():
        value = getattr(metric, name)
        if isinstance(default, list):
            setattr(metric, name, value if isinstance(value, list) else [value])
        elif metric._reductions[name] not in (dim_zero_sum, dim_zero_mean, dim_zero_max, dim_zero_min):
            setattr(metric, name, metric._cache[name])


def use_own_states(metric: Metric) -> None:
    """Give ``metric`` its own states back, if it has those of all ranks."""
    if metric._is_synced:
        metric.unsync()


def forget_what_adds_up(metric: Metric, names: list[str]) -> None:
    """Begin the states ``names`` anew that would count twice if two ranks had them: sums and lists."""
    for name in names:
        default = metric._defaults[name]
        if isinstance(default, list):
            setattr(metric, name, [])
        elif metric._reductions[name] is dim_zero_sum:
            setattr(metric, name, default.detach().clone().to(metric.device))
