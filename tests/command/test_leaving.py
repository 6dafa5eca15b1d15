"""Rank 0, whose store the others use, leaves after those that meet the same mistake; it does not wait for the rest."""

import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_automodel.command import leaving
from lightning_automodel.testing.pool import Pool


def leave(others_come: bool) -> float:
    """Runs on each rank; returns the seconds that it waited."""
    leaving._PATIENCE = timedelta(seconds=10 if others_come else 1)
    started = time.monotonic()
    if dist.get_rank() == 1:
        time.sleep(0.5 if others_come else 3)
    if dist.get_rank() == 0 or others_come:
        leaving.wait_for_others()
    return time.monotonic() - started


def test_rank_0_waits_for_those_that_come(pool2: Pool) -> None:
    waited, _ = pool2.run(leave, True)
    assert 0.4 < waited < 9


@pytest.mark.slow
def test_rank_0_does_not_wait_for_ever(pool2: Pool) -> None:
    waited, _ = pool2.run(leave, False)
    assert 0.9 < waited < 2.9


def test_a_process_alone_does_not_wait() -> None:
    leaving.wait_for_others()
