"""Where tokens go in a run that is only planned: evenly to all experts, because no router has values."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_automodel.parallel.experts.dispatch import Routes, Rows, dispatch


def dispatch_evenly(
    hidden: Tensor, index: Tensor, weights: Tensor, run: Rows, places: Tensor, group: ProcessGroup
) -> Tensor:
    """Communicate as a real step does whose routers are even: a ``Dispatcher`` of expert parallelism."""
    ranks = group.size()
    counts = torch.zeros(ranks, len(places) // ranks, dtype=torch.int64, device=index.device)
    dist.all_to_all_single(torch.empty_like(counts), counts, group=group)
    rows = [len(part) for part in range_of(index.numel(), ranks)]
    order = places[index.reshape(-1)].argsort(stable=True)
    experts = torch.zeros(sum(rows), dtype=torch.int64, device=index.device)
    return dispatch(hidden, weights, run, Routes(order, rows, rows, experts), group)


def range_of(size: int, parts: int) -> list[range]:
    """Cut ``size`` into ``parts`` that differ by one at most."""
    return [range(size * i // parts, size * (i + 1) // parts) for i in range(parts)]
