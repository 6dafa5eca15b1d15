"""Notes which layers a rank gathers, in which order: all ranks must gather the same, and nothing tells them apart.

Heads that a batch chooses, with different batches on two ranks::

    rank 0    body   heads.1        the all-gather of both second ones takes place, and either rank
    rank 1    body   heads.2        gets half of heads.1 and half of heads.2

A digest of the order goes along with what ranks agree on before each step.
"""

import zlib
from collections import deque
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import nn

from lightning_automodel._compat.fsdp2 import fsdp_units, has_replicas, parameter_groups

_MOST = 4096  # calls whose layers are remembered
_numbers = count()


@dataclass
class Gathered:
    """What a rank has gathered.

    Attributes:
        digest: of the order, 23 bits: a whole number in float32.
        layers: the last ones.
    """

    digest: int = 0
    layers: deque[nn.Module] = field(default_factory=lambda: deque(maxlen=_MOST))


_since_last_step = Gathered()


def note_gathers(model: nn.Module) -> None:
    """Note from now on when an FSDP2 unit of ``model`` is gathered for its forward pass."""
    for unit in fsdp_units(model):
        assert isinstance(unit, nn.Module)
        unit.register_forward_pre_hook(_Note(next(_numbers)), prepend=True)


def take_gathers() -> Gathered:
    """Return what was gathered since the last call."""
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
            _since_last_step.digest = digest & 0x7FFFFF
            _since_last_step.layers.append(unit)
