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
    """Computes a 64-bit signed hash of everything in ``batch`` that has a value; of other objects their type counts.

    The order of a mapping does not count. What is there twice, or holds itself, counts once.
    """
    state = hashlib.blake2b(digest_size=8)
    opened: dict[int, Any] = {}  # by id; kept, or their ids would come again
    left = [batch]
    while left:
        value = left.pop()
        items = _items(value)
        if items is not None and id(value) not in opened:
            opened[id(value)] = value
            state.update(f"{type(value).__name__}{len(items)}".encode())
            left.extend(reversed(items))
        else:
            for piece in _pieces(value):
                state.update(piece)
    return int.from_bytes(state.digest(), "big", signed=True)


def _items(value: Any) -> list[Any] | None:
    """Collect what a container holds, in one order on all ranks; ``None`` for what is none."""
    if isinstance(value, Mapping):
        named = sorted(((repr(key), item) for key, item in value.items()), key=lambda pair: pair[0])
        return [each for pair in named for each in pair]
    if isinstance(value, list | tuple):
        return list(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return None


def _pieces(value: Any) -> Iterator[bytes]:
    if isinstance(value, Tensor) and value.layout == torch.strided and not (value.is_nested or value.is_meta):
        yield f"{value.dtype}{tuple(value.shape)}".encode()
        plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        yield plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        yield f"{value.dtype}{value.shape}".encode()
        yield value.tobytes()
    elif isinstance(value, str | bytes | numbers.Number | None):
        yield repr(value).encode()
    else:
        yield type(value).__qualname__.encode()
