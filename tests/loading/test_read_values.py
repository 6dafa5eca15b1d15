"""Sums of what was read from files tell changes of values, whatever bits these have in common."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_automodel.loading.read_values import _sum_of

CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "sign": torch.neg,
    "twice": lambda w: w * 2,
    "half": lambda w: w / 2,
    "sign of two rows": lambda w: torch.cat([-w[:2], w[2:]]),
    "order": lambda w: w.roll(1, 0),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_told(change: str, dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).to(dtype))
    assert _sum_of(weight.clone()) == _sum_of(weight)
    for value in (weight, weight[0]):
        assert _sum_of(CHANGES[change](value)).total != _sum_of(value).total
