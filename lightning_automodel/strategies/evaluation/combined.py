"""Several loaders of which each step takes a batch: how far they are read depends on the share of a rank."""

from typing import Any

import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.distributed import ProcessGroup

from lightning_automodel._compat.lightning.evaluation_loops import mode_of
from lightning_automodel.distributed.logs import warn_once

_LENGTHS_DECIDE = {  # by mode
    "min_size": "some samples are left out",
    "max_size_cycle": "some samples count twice",
    "max_size": "a step that runs a sharded model once per loader waits forever where another data rank has None",
}


def warn_of_unlike_shares(loader: CombinedLoader, group: ProcessGroup) -> None:
    """Warn where each step takes a batch of every loader, and the ranks have unlike numbers. Collective if so."""
    mode = mode_of(loader)
    if mode not in _LENGTHS_DECIDE or len(loader.flattened) == 1:
        return
    lengths: list[Any] = [None] * group.size()
    limits = loader.limits or [float("inf")] * len(loader.flattened)
    found = [(sized_len(each), limit) for each, limit in zip(loader.flattened, limits, strict=True)]
    dist.all_gather_object(lengths, [length and min(length, limit) for length, limit in found], group=group)
    if any(each != lengths[0] for each in lengths):
        shown = ", ".join(f"data rank {rank}: {each}" for rank, each in enumerate(lengths))
        warn_once(
            f"the data ranks have different numbers of batches of the loaders of CombinedLoader(mode={mode!r}) "
            f"({shown}), so {_LENGTHS_DECIDE[mode]}, unlike in one process. Use mode='sequential', or numbers of "
            "samples that divide"
        )
