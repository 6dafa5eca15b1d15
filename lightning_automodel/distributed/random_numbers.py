"""Random numbers as a function of the seed, the step and the place in the mesh, and of nothing that a user draws.

::

    a user's generators    ---- a ---- b -------------------------- c ---- d ---->   each rank its own
                                       |                            |
    a forward pass                     +-- seed(run, place, step) --+                equal on the ranks of the tp axis

A pass that draws moves the user's generator by one number. So a pass that begins where a pass that drew began computes
that one again (``torch.utils.checkpoint`` puts the state back, and so does a user), and draws the same.
"""

import random
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lightning_automodel._compat.torch.tensors import without_functorch

Key = int | str | bool
_MOST_KEPT = 2**14  # passes that may be computed again, where nobody says when a micro-batch begins


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
        drawn: the seeds of passes of this micro-batch that drew, by where the user's generator was.
    """

    seed: int
    data_rank: int = 0
    stage: str = ""
    step: int = 0
    micro_batch: int = 0
    passes: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    drawn: dict[bytes, "PassSeeds"] = field(default_factory=dict)

    def begin(self, stage: str, step: int, micro_batch: int) -> None:
        """Count passes from now on as those of this micro-batch."""
        self.stage, self.step, self.micro_batch = stage, step, micro_batch
        self.passes, self.drawn = {True: 0, False: 0}, {}

    def next_pass(self, training: bool, begins_at: bytes = b"") -> "PassSeeds":
        """Returns the seeds of the forward pass that begins now.

        Args:
            training: its mode.
            begins_at: where the user's generator is; where it was for a pass that drew, this is that pass again.
        """
        if begins_at in self.drawn:
            return self.drawn[begins_at]
        place = (self.seed, self.stage, self.step, self.micro_batch, training, self.passes[training])
        self.passes[training] += 1
        return PassSeeds(own=derive_seed(*place, "data", self.data_rank), common=derive_seed(*place, "all"))

    def go_on(self, begins_at: bytes, seeds: "PassSeeds") -> None:
        """Move the user's generator behind a pass that drew, and note where it began."""
        while len(self.drawn) >= _MOST_KEPT:
            del self.drawn[next(iter(self.drawn))]
        self.drawn[begins_at] = seeds
        torch.randint(2, ())


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
def drawing_from(seeds: PassSeeds) -> Generator[Callable[[], bool], None, None]:
    """Start all generators at ``seeds`` within this context, and tell whether any has drawn; afterwards they are as
    before.

    torch's draw for the samples of a rank. With numpy's and Python's own, models decide which layers to skip, and data
    ranks that skip different ones would wait for each other.
    """
    before = random.getstate(), np.random.get_state(), generator_states()
    random.seed(seeds.common)
    np.random.seed(seeds.common % 2**32)
    seed_generators(seeds.own)
    began = _places()
    try:
        yield lambda: _places() != began
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        restore_generators(before[2])


def _places() -> tuple[Any, ...]:
    """Return what changes where any generator of this rank draws."""
    numpy: Any = np.random.get_state()
    return random.getstate(), numpy[1].tobytes(), numpy[2:], *places_of_generators()


def places_of_generators() -> list[bytes]:
    """Return the states of torch's generators as what can be compared, also where tensors have no values."""
    with without_functorch():
        return [state.numpy().tobytes() for state in generator_states()]


def place_of_users() -> bytes:
    """Return where the generator of the CPU is, in few bytes."""
    with without_functorch():
        return blake2b(torch.default_generator.get_state().numpy().tobytes(), digest_size=16).digest()


def generator_states() -> list[torch.Tensor]:
    """Returns the states of torch's generators on this rank: of the CPU, and of the device in use. No wait for the
    device.
    """
    with without_functorch():  # within torch.func.grad a state would be a tensor without values
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

    However much is drawn in it, the generators then go on in the same place: ranks that draw unlike stay together. If
    nothing is, they go on where they were.
    """
    before = generator_states()
    seed = int(torch.randint(2**62, ()))
    behind = generator_states()
    seed_generators(derive_seed(seed, *salt))
    began = places_of_generators()
    try:
        yield
    finally:
        restore_generators(before if places_of_generators() == began else behind)


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
