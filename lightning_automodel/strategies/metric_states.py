"""Collects the states of torchmetrics over the data ranks, of which each has its own samples, and perhaps none.

A list that torchmetrics gathers by element, as that of ``ROUGEScore``, of ranks with two samples and one::

    rank 0    [a, b]               first [a, c], then [b]; rank 1 would not come to the second, and rank 0 wait for it
    rank 1    [c]      nothing
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_automodel._compat.metrics import (
    before_gathering,
    combine_states,
    forget_what_adds_up,
    lists_gathered_by_element,
    saved_states,
    use_own_states,
)
from lightning_automodel.distributed.unlike_tensors import gather_unlike


class GatherOverDataRanks:
    """What torchmetrics calls to collect the states of a metric.

    Not ``metric.process_group``, because a module that holds a process group can be neither copied nor pickled.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group

    def __call__(self, value: Tensor, group: Any | None = None) -> list[Tensor]:
        """Gathers the values of all data ranks, or of a group that the metric names itself."""
        everyone = group or self.group
        found = gather_unlike(None if isinstance(value, _Nothing) else value, everyone, value.device)
        if not isinstance(value, _Nothing):
            found[dist.get_rank(everyone)] = value  # with its graph
        return _of_one_kind([each for each in found if each is not None])

    def __deepcopy__(self, memo: dict) -> "GatherOverDataRanks":
        return self

    def __reduce__(self) -> tuple[Callable, tuple]:
        return _default_gather, ()


class _Nothing(Tensor):
    """Stands in a list for what other ranks have there."""


def reduce_metrics_over(module: nn.Module, group: ProcessGroup) -> None:
    """Makes every torchmetrics metric in ``module`` combine its states over ``group``, unless it says otherwise."""
    for metric in module.modules():
        if not isinstance(metric, Metric) or metric.process_group is not None:
            continue
        if metric.dist_sync_fn is None or isinstance(metric.dist_sync_fn, GatherOverDataRanks):
            metric.dist_sync_fn = GatherOverDataRanks(group)
            before_gathering(metric, _fill_lists)


@contextmanager
def combined_states(module: nn.Module) -> Generator[None, None, None]:
    """Let the metrics of ``module`` that go into checkpoints have the states of all data ranks in this context.
    Collective.

    A checkpoint has room for those of one rank: without it, what the others have counted in an epoch would be lost.
    """
    saved = [each for each in module.modules() if isinstance(each, Metric) and saved_states(each)]
    found = [m for m in saved if isinstance(f := m.dist_sync_fn, GatherOverDataRanks) and f.group.size() > 1]
    try:
        for metric in found:
            combine_states(metric)
        yield
    finally:
        for metric in found:
            use_own_states(metric)


def leave_to_first_rank(module: nn.Module, state: Mapping[str, Any], data_rank: int) -> None:
    """Let only the first data rank go on with what metrics have found in ``state``, which is that of all ranks."""
    for prefix, metric in module.named_modules() if data_rank else ():
        if isinstance(metric, Metric):
            forget_what_adds_up(metric, [name for name in saved_states(metric) if f"{prefix}.{name}" in state])


def _fill_lists(metric: Metric, gather: Callable, group: Any | None) -> None:
    """Give lists that are gathered by element as many elements as the longest of all ranks has. Collective if there
    are any.
    """
    lists = lists_gathered_by_element(metric)
    if not lists or not isinstance(gather, GatherOverDataRanks):
        return
    counts = [sum(isinstance(element, Tensor) for element in state) for state in lists.values()]
    most = torch.tensor(counts, device=metric.device)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group or gather.group)
    for (name, state), count, longest in zip(lists.items(), counts, most.tolist(), strict=True):
        nothing = torch.empty(0, device=metric.device).as_subclass(_Nothing)
        setattr(metric, name, [*state, *[nothing] * (longest - count)])


def _of_one_kind(values: list[Tensor]) -> list[Tensor]:
    """Lay out values as torchmetrics joins them: numbers of a rank with one beside rows of others, and the empty tensor
    of a rank without samples, whose shape and dtype say nothing.
    """
    if len({value.ndim for value in values} - {0}) and any(value.ndim == 0 for value in values):
        values = [value.view(1) if value.ndim == 0 else value for value in values]
    told = next((value for value in values if value.shape != (0,)), None)
    if told is None or told.ndim == 0:
        return values
    return [told.new_empty(0, *told.shape[1:]) if value.shape == (0,) else value for value in values]


def _default_gather() -> Callable:
    return gather_all_tensors
