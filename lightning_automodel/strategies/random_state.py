"""Gives the ranks of a tensor-parallel group one random state, so that they shuffle, drop out and sample alike."""

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


def share_random_state(group: ProcessGroup) -> None:
    """Sets the random states of ``random``, numpy and torch to those of the group's first rank."""
    if group.size() == 1:
        return
    states: list[Any] = [_states()]
    dist.broadcast_object_list(states, group=group, group_src=0)
    python, numpy, cpu, device = states[0]
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    if device is not None:
        torch.cuda.set_rng_state(device)


def _states() -> tuple[Any, Any, torch.Tensor, torch.Tensor | None]:
    device = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), device
