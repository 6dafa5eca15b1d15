"""Marks for single cases of a parametrized test."""

from collections.abc import Iterable
from typing import Any

import pytest


def with_long(cases: Iterable[Any], *long: Any) -> list[Any]:
    """``cases``, of which those in ``long`` run in ``make test-long`` only: others see the same at less cost."""
    marked = ((case, pytest.mark.long if case in long else ()) for case in cases)
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks) for case, marks in marked]
