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


def choose_position(checkpoint: Mapping[str, Any], data_rank: int, data_size: int) -> None:
    """Puts the state of this data rank where Lightning looks for it."""
    positions = checkpoint.get(POSITIONS, [])
    if not positions:
        return
    if len(positions) != data_size and any(position != positions[0] for position in positions):
        warn_once(
            f"the checkpoint holds positions of {len(positions)} data ranks, which differ, and there are {data_size} "
            f"now: rank i goes on where rank i modulo {len(positions)} was, so some samples of this epoch may be seen "
            "twice and others not. Resume with as many data ranks, or from the end of an epoch, to continue exactly"
        )
    _fit_loop(checkpoint)[_LOADER] = positions[data_rank % len(positions)]


def _fit_loop(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    return checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
