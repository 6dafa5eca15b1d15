"""Digests of samples and batches, for ranks to compare, and who has the same."""

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


def who_agrees(values: list[int], group: ProcessGroup) -> list[list[int]]:
    """Groups the global ranks of ``group`` by what each has in ``values``."""
    parties: dict[int, list[int]] = {}
    for rank, value in zip(dist.get_process_group_ranks(group), values, strict=True):
        parties.setdefault(value, []).append(rank)
    return list(parties.values())


def shown(parties: list[list[int]]) -> str:
    """Name ranks that differ, those that agree together."""
    return " and ".join(f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" for ranks in parties)


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
