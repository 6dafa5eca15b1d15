"""Marks for single cases of a parametrized test, and what outcomes depend on."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch

SHARDS_TAKE_MASKS = torch.__version__ >= (2, 15)
"""``tensor[mask] = value`` works on DTensors, each rank its own: from torch 2.15 on."""

OLD_FSDP2 = torch.__version__ < (2, 13)
"""A unit of several blocks is reduced behind each of them; and some operations on parameters that tp and FSDP2 both
split are refused."""


def with_long(cases: Iterable[Any], *long: Any) -> list[Any]:
    """``cases``, of which those in ``long`` run in ``make test-long`` only: others see the same at less cost."""
    marked = ((case, pytest.mark.long if case in long else ()) for case in cases)
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks) for case, marks in marked]
