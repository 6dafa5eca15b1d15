"""Samplers of users whose order of a pass follows from the passes before."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler, WeightedRandomSampler


class ByNumpy(Sampler):
    """Draws indices, or batches of ``size`` of them, when a pass begins, from a generator of its own that goes on."""

    def __init__(self, rows: int, size: int = 1) -> None:
        self.numbers, self.rows, self.size = np.random.default_rng(3), rows, size

    def __len__(self) -> int:
        return self.rows // self.size

    def __iter__(self) -> Iterator[Any]:
        order = self.numbers.permutation(self.rows).tolist()
        return iter(order if self.size == 1 else [order[i : i + self.size] for i in range(0, self.rows, self.size)])


def drawing(rows: int) -> WeightedRandomSampler:
    """Draws rows, some of them several times, from a generator of torch's that goes on."""
    return WeightedRandomSampler([*range(1, rows + 1)], rows, generator=torch.Generator().manual_seed(5))
