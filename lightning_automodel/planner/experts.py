"""Where tokens go in a run that is only planned: evenly to all experts, because no router has values."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_automodel.distributed.collectives import shard_bounds
from lightning_automodel.parallel.experts.dispatch import Routes, Rows, dispatch


def dispatch_evenly(
    hidden: Tensor, index: Tensor, weights: Tensor, run: Rows, places: Tensor, group: ProcessGroup
) -> Tensor:
    """Communicate as a real step does whose routers are even: a ``Dispatcher`` of expert parallelism."""
    ranks = group.size()
    counts = torch.zeros(ranks, len(places) // ranks, dtype=torch.int64, device=index.device)
    dist.all_to_all_single(torch.empty_like(counts), counts, group=group)
    rows = [shard_bounds(index.numel(), ranks, i)[1] for i in range(ranks)]
    order = places[index.reshape(-1)].argsort(stable=True)
    experts = torch.zeros(sum(rows), dtype=torch.int64, device=index.device)
    return dispatch(hidden, weights, run, Routes(order, rows, rows, experts), group)
