"""Random numbers as a function of the seed, the step and the place in the mesh, and of nothing that a user draws.

::

    a user's generators    ---- a ---- b -------------------------- c ---- d ---->   each rank its own, untouched
                                       |                            |
    a forward pass                     +-- seed(run, place, step) --+                equal on the ranks of the tp axis
"""

import random
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

Key = int | str | bool


def derive_seed(*key: Key) -> int:
    """Returns a seed in 63 bits, another for every ``key``."""
    return int.from_bytes(blake2b(repr(key).encode(), digest_size=8).digest(), "little") >> 1


@dataclass
class RandomNumbers:
    """The random numbers of forward passes, each from a seed of its own.

    Attributes:
        seed: of the run; equal on all ranks.
        data_rank: which samples a rank sees; ranks of one tp group have the same.
        stage: training, validation, and so on; passes of one do not shift those of another.
        step: optimizer steps so far.
        micro_batch: of this step.
        passes: since the micro-batch began, in training and in evaluation mode.
    """

    seed: int
    data_rank: int = 0
    stage: str = ""
    step: int = 0
    micro_batch: int = 0
    passes: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})

    def begin(self, stage: str, step: int, micro_batch: int) -> None:
        """Count passes from now on as those of this micro-batch."""
        self.stage, self.step, self.micro_batch = stage, step, micro_batch
        self.passes = {True: 0, False: 0}

    def next_pass(self, training: bool) -> "PassSeeds":
        """Returns the seeds of the forward pass that begins now."""
        place = (self.seed, self.stage, self.step, self.micro_batch, training, self.passes[training])
        self.passes[training] += 1
        return PassSeeds(own=derive_seed(*place, "data", self.data_rank), common=derive_seed(*place, "all"))


@dataclass(frozen=True, kw_only=True)
class PassSeeds:
    """The seeds of one forward pass.

    Attributes:
        own: of draws for this rank's samples.
        common: of draws that all data ranks must agree on.
    """

    own: int
    common: int


def agreed_seed(device_type: str) -> int:
    """Returns the seed of rank 0's generator, on all ranks. Collective over all of them."""
    seed = torch.initial_seed() & (2**63 - 1)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return seed
    device = torch.device(device_type, torch.cuda.current_device()) if device_type == "cuda" else "cpu"
    shared = torch.tensor(seed, dtype=torch.int64, device=device)
    dist.broadcast(shared, src=0)
    return int(shared)


@contextmanager
def drawing_from(seeds: PassSeeds) -> Generator[None, None, None]:
    """Start all generators at ``seeds`` within this context; afterwards they are as before.

    torch's draw for the samples of a rank. With numpy's and Python's own, models decide which layers to skip, and data
    ranks that skip different ones would wait for each other.
    """
    before = random.getstate(), np.random.get_state(), generator_states()
    random.seed(seeds.common)
    np.random.seed(seeds.common % 2**32)
    seed_generators(seeds.own)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        restore_generators(before[2])


def generator_states() -> list[torch.Tensor]:
    """Returns the states of torch's generators on this rank: of the CPU, and of the device in use. No wait for the
    device.
    """
    return [generator.get_state() for generator in _generators()]


def seed_generators(seed: int) -> None:
    """Start torch's generators on this rank at ``seed``."""
    for generator in _generators():
        generator.manual_seed(seed)


def restore_generators(states: list[torch.Tensor]) -> None:
    """Puts back what :func:`generator_states` gave."""
    for generator, state in zip(_generators(), states, strict=False):
        generator.set_state(state)


@contextmanager
def drawing_aside(*salt: Key) -> Generator[None, None, None]:
    """Let torch draw from a stream of its own within this context, another for each ``salt`` and each time.

    However much is drawn in it, the generators then go on in the same place: ranks that draw unlike stay together.
    """
    seed = int(torch.randint(2**62, ()))
    states = generator_states()
    seed_generators(derive_seed(seed, *salt))
    try:
        yield
    finally:
        restore_generators(states)


def generator_of(device: torch.device) -> torch.Generator:
    """Returns torch's default generator for ``device``."""
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator


def _generators() -> list[Any]:
    generators: list[Any] = [torch.default_generator]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return generators
