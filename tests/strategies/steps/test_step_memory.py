"""The peak of a step under the Trainer is that of a loop by hand, on one rank; on a GPU: tests/gpu/test_memory.py."""

import gc
from collections.abc import Callable
from functools import partial

import pytest
import torch

from lightning_automodel import DDPStrategy, FSDP2TPStrategy
from tests.support.wide import LAYERS, Holding, Wide, fit_wide, loop_by_hand

WIDTH = 256
WEIGHT = WIDTH**2 * 4
"""Bytes of a layer's weight, of its gradient, and of a batch of activations."""


def peak(run: Callable[[], object]) -> int:
    """What ``run`` holds at most of what it allocates, in weights."""
    gc.collect()  # or what others have left is freed meanwhile
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    held = highest = 0
    for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            held += event.nbytes()
            highest = max(highest, held)
    return round(highest / WEIGHT)


def peak_of(module: type[Wide], strategy: type) -> int:
    """That of steps under the Trainer."""
    return peak(lambda: fit_wide(module(WIDTH), WIDTH, strategy()))


@pytest.mark.slow
def test_one_data_rank_holds_nothing_more() -> None:
    loop = peak(partial(loop_by_hand, WIDTH))
    assert loop > 2 * LAYERS  # weights, and activations or gradients
    assert peak_of(Wide, FSDP2TPStrategy) == loop
    assert peak_of(Wide, DDPStrategy) == loop + LAYERS  # buckets


def test_gradients_of_the_step_before_are_not_held() -> None:
    assert peak_of(Holding, FSDP2TPStrategy) - peak_of(Wide, FSDP2TPStrategy) > LAYERS / 2
