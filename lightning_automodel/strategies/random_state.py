"""Keeps the random numbers of a run: those that models draw, by seed and step, and the user's generators.

The ranks of a tensor-parallel group start with one state of the user's generators, and so shuffle alike as long as they
draw alike. A checkpoint holds the state of each data rank. What models draw does not depend on any of it.
"""

import random
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from lightning_automodel.distributed.random_numbers import RandomNumbers, agreed_seed
from lightning_automodel.parallel.draws.passes import draw_from, lone_dropouts
from lightning_automodel.strategies.submodels import find_submodels

RANDOM_STATES = "random_states"
RANDOM_NUMBERS = "random_numbers"
State = dict[str, Any]


class ModelDraws:
    """The random numbers that the models of one LightningModule draw, whatever trainers it goes through."""

    def __init__(self) -> None:
        self._numbers: RandomNumbers | None = None

    def install(self, module: "pl.LightningModule", data_rank: int, device_type: str) -> None:
        """Gives all models, layers and dropout modules that ``module`` holds the numbers of one run. Collective.

        The seed is that of rank 0's generator.
        """
        self._numbers = RandomNumbers(seed=agreed_seed(device_type), data_rank=data_rank)
        submodels = [submodel.module for submodel in find_submodels(module, bare=True)]
        for drawing in (*submodels, *lone_dropouts(module, submodels)):
            draw_from(drawing, self._numbers)

    def begin(self, trainer: "pl.Trainer") -> None:
        """Begin a micro-batch, or a step of an evaluation."""
        stage, step = trainer.state.stage, trainer.global_step
        assert self._numbers is not None
        assert stage is not None
        again = (self._numbers.stage, self._numbers.step) == (stage.value, step)
        self._numbers.begin(stage.value, step, self._numbers.micro_batch + 1 if again else 0)

    def state(self) -> State:
        """Return what a checkpoint holds of it, which means the same on every layout."""
        assert self._numbers is not None
        return {name: getattr(self._numbers, name) for name in ("seed", "stage", "step", "micro_batch")}

    def restore(self, checkpoint: Mapping[str, Any]) -> None:
        """Goes on as the run that wrote ``checkpoint``; one of another library has no seed, and this run's stays."""
        assert self._numbers is not None
        for name, value in checkpoint.get(RANDOM_NUMBERS, {}).items():
            setattr(self._numbers, name, value)


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
    """Collects the random state of each data rank; ranks that see the same samples share one. Collective over the
    group.
    """
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
    """Reads the random states as plain containers and tensors, which load with ``weights_only=True``."""
    numpy: Any = np.random.get_state()
    name, keys, *others = numpy
    return {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *others),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }
