"""Notes which layers a rank gathers, in which order, and whose gradients it reduces: all ranks must do the same, and
nothing tells them apart.

Heads that a batch chooses, with different batches on two ranks::

    rank 0    body   heads.1        the all-gather of both second ones takes place, and either rank
    rank 1    body   heads.2        gets half of heads.1 and half of heads.2

Adapters that a batch chooses by ``requires_grad``::

    rank 0    reduces    lora_A.one      the sum of both becomes a gradient of lora_A.one on rank 0,
    rank 1    reduces    lora_A.two      and of lora_A.two on rank 1

Digests of both go along with what ranks agree on before each step.
"""

import zlib
from collections import deque
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor, nn

from lightning_automodel._compat.fsdp2.units import fsdp_units, has_replicas, parameter_groups

_MOST = 4096  # calls whose layers are remembered
_BITS = 0x7FFFFF
_numbers = count()


@dataclass
class Gathered:
    """What a rank has gathered, and reduced.

    Attributes:
        digest: of the order, 23 bits: a whole number in float32.
        layers: the last ones.
        digest_reduced: of the parameters whose gradients were reduced, likewise.
        reduced: these, by reduction; the last ones.
    """

    digest: int = 0
    layers: deque[nn.Module] = field(default_factory=lambda: deque(maxlen=_MOST))
    digest_reduced: int = 0
    reduced: deque[list[Tensor]] = field(default_factory=lambda: deque(maxlen=_MOST))


_since_last_step = Gathered()


def note_gathers(model: nn.Module) -> None:
    """Note from now on when an FSDP2 unit of ``model`` is gathered for its forward pass."""
    for unit in fsdp_units(model):
        assert isinstance(unit, nn.Module)
        unit.register_forward_pre_hook(_Note(next(_numbers)), prepend=True)


def note_reduction(group: int, takes_part: list[bool], parameters: list[Tensor]) -> None:
    """Note whose gradients an FSDP2 group reduces now.

    Args:
        group: its number, the same on all ranks.
        takes_part: of all its parameters.
        parameters: those that do.
    """
    digest = zlib.crc32(bytes(takes_part), zlib.crc32(group.to_bytes(4, "big"), _since_last_step.digest_reduced))
    _since_last_step.digest_reduced = digest & _BITS
    _since_last_step.reduced.append(parameters)


def take_gathers() -> Gathered:
    """Return what was gathered and reduced since the last call."""
    global _since_last_step
    taken, _since_last_step = _since_last_step, Gathered()
    return taken


@dataclass(frozen=True)
class _Note:
    number: int

    def __call__(self, unit: nn.Module, args: tuple) -> None:
        # What is read without gradients is gathered within a replica alone: each may read its own.
        if any(g.is_sharded and (torch.is_grad_enabled() or not has_replicas(g)) for g in parameter_groups(unit)):
            digest = zlib.crc32(self.number.to_bytes(4, "big"), _since_last_step.digest)
            _since_last_step.digest = digest & _BITS
            _since_last_step.layers.append(unit)
