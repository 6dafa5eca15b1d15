"""Gives the ranks of a tensor-parallel group one random state, so that they shuffle, drop out and sample alike, and
saves and restores the state of each data rank.
"""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

RANDOM_STATES = "random_states"
State = dict[str, Any]


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


def collect_random_states(data_group: ProcessGroup) -> list[State]:
    """The random state of each data rank; ranks that see the same samples share one. Collective over the group."""
    states: list[State] = [{}] * data_group.size()
    dist.all_gather_object(states, _random_state(), group=data_group)
    return states


def restore_random_state(checkpoint: Mapping[str, Any], data_rank: int) -> None:
    """Sets the state that this rank of the data group had; ranks that were not there when it was saved keep theirs."""
    states = checkpoint.get(RANDOM_STATES, [])
    if data_rank >= len(states):
        return
    state = states[data_rank]
    random.setstate(state["python"])
    name, keys, *others = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *others))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _random_state() -> State:
    """As plain containers and tensors, which load with ``weights_only=True``."""
    numpy: Any = np.random.get_state()
    name, keys, *others = numpy
    return {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *others),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }
