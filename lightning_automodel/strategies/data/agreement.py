"""Compares the first batches of each stage over the ranks of tp and cp, which compute one model together."""

import dataclasses
import hashlib
import numbers
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

COMPARED = 3  # batches per stage: enough for a wrong sampler or seed to show, too few to cost time


class BatchAgreement:
    """Counts the batches of a stage and compares the first ones."""

    def __init__(self) -> None:
        self._seen = COMPARED

    def start(self) -> None:
        """Begins a stage, whose first batches are to be compared."""
        self._seen = 0

    def check(self, batch: Any, group: ProcessGroup, device: torch.device, stage: str) -> None:
        """Compares ``batch`` if it is one of the first. Collective over ``group``.

        Args:
            batch: any nest of containers, tensors, arrays, numbers and strings.
            group: the ranks that must have the same batch.
            device: that the group communicates on.
            stage: named in the error.

        Raises:
            ValueError: on every rank of the group, with the global ranks that differ.
        """
        if self._seen >= COMPARED or group.size() == 1:
            return
        number, self._seen = self._seen, self._seen + 1
        mine = torch.tensor(digest(batch), device=device)
        gathered = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(gathered, mine, group=group)
        parties: dict[int, list[int]] = {}
        for rank, value in zip(dist.get_process_group_ranks(group), gathered, strict=True):
            parties.setdefault(int(value), []).append(rank)
        if len(parties) > 1:
            raise ValueError(_disagreement(list(parties.values()), number, stage))


def digest(batch: Any) -> int:
    """Computes a 64-bit signed hash of everything in ``batch`` that has a value; of other objects their type counts."""
    state = hashlib.blake2b(digest_size=8)
    for piece in _pieces(batch):
        state.update(piece)
    return int.from_bytes(state.digest(), "big", signed=True)


def _pieces(value: Any) -> Iterator[bytes]:
    if isinstance(value, Tensor) and value.layout == torch.strided:
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        yield value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        yield f"{value.dtype}{value.shape}".encode()
        yield value.tobytes()
    elif isinstance(value, str | bytes | numbers.Number | None):
        yield repr(value).encode()
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield repr(key).encode()
            yield from _pieces(item)
    elif isinstance(value, list | tuple):
        yield f"{type(value).__name__}{len(value)}".encode()
        for item in value:
            yield from _pieces(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _pieces(getattr(value, field.name))
    else:
        yield type(value).__qualname__.encode()


def _disagreement(parties: list[list[int]], number: int, stage: str) -> str:
    different = " and ".join(f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" for ranks in parties)
    return (
        f"{different} have different data in batch {number} of {stage}, but they compute one model together (tp, cp) "
        "and must see the same samples in the same order. Leave the samples to the trainer "
        "(Trainer(use_distributed_sampler=True)), or seed what is random (L.seed_everything, a generator with a fixed "
        "seed), or divide the samples by strategy.data_rank and strategy.data_size instead of the global rank"
    )
