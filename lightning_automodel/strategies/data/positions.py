"""The position in the data, for loaders that know theirs: saved of every data rank, where Lightning keeps rank 0's."""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from lightning_automodel.distributed.logs import warn_once

POSITIONS = "dataloader_states"
_LOADER = "combined_loader"


def collect_positions(checkpoint: Mapping[str, Any], data_group: ProcessGroup) -> list[Any]:
    """Collects the states of the training loaders of each data rank, of which Lightning has its own rank's.

    Collective over the group. Empty where no loader has a state (``state_dict`` and ``load_state_dict``, as torchdata's
    ``StatefulDataLoader``).
    """
    positions: list[Any] = [None] * data_group.size()
    dist.all_gather_object(positions, _fit_loop(checkpoint).get(_LOADER), group=data_group)
    return positions if any(position is not None for position in positions) else []


def choose_position(checkpoint: Mapping[str, Any], data_rank: int) -> None:
    """Puts the state of this data rank where Lightning looks for it."""
    positions = checkpoint.get(POSITIONS, [])
    if not positions:
        return
    _fit_loop(checkpoint)[_LOADER] = positions[data_rank % len(positions)]


def warn_of_other_ranks(loader: Any, before: int, now: int) -> None:
    """Warn that the states of ``loader``, if there is one, are those of another number of data ranks."""
    if loader is not None:
        warn_once(
            f"the checkpoint holds states of {type(loader).__name__} on {before} data ranks, and there are {now} now: "
            f"rank i goes on where the state of rank i modulo {before} says. If that is a position among the batches "
            "or samples of one rank, some samples of this epoch are seen twice and others not. Resume with as many "
            "data ranks, or from the end of an epoch, to continue exactly"
        )


def holds_one_position(checkpoint: Mapping[str, Any]) -> bool:
    """Tell whether there are states of loaders of rank 0 alone, as Lightning's own strategies save them."""
    return not checkpoint.get(POSITIONS) and bool(_fit_loop(checkpoint).get(_LOADER))


def warn_of_one_position(loader: Any, now: int) -> None:
    """Warn that the state of ``loader``, if there is one, is that of one rank among nobody knows how many."""
    if loader is not None:
        warn_once(
            f"the checkpoint holds the state of {type(loader).__name__} on rank 0 only, as Lightning's own strategies "
            f"save it, and does not say how many ranks read data: each of the {now} data ranks here goes on where it "
            f"says. If the run before had not {now} as well, or other sizes of batches, some samples of this epoch are "
            "seen twice and others not. Resume from the end of an epoch to continue exactly"
        )


def _fit_loop(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    return checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
