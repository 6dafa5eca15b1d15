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


_CASE = type(pytest.param())


def with_long(cases: Iterable[Any], *long: Any) -> list[Any]:
    """``cases``, of which those in ``long`` run in ``make test-long`` only: others see the same at less cost."""
    return _marked(cases, long, pytest.mark.long)


def with_slow(cases: Iterable[Any], *slow: Any) -> list[Any]:
    """``cases``, of which those in ``slow`` do not run in ``make test``."""
    return _marked(cases, slow, pytest.mark.slow)


def _marked(cases: Iterable[Any], chosen: tuple[Any, ...], mark: pytest.MarkDecorator) -> list[Any]:
    made = [
        case if isinstance(case, _CASE) else pytest.param(*(case if isinstance(case, tuple) else (case,)))
        for case in cases
    ]
    return [pytest.param(*case.values, marks=mark) if _value_of(case) in chosen else case for case in made]


def _value_of(case: Any) -> Any:
    return case.values if len(case.values) > 1 else case.values[0]
