"""The peak of a step under the Trainer is that of a loop by hand, on one rank; on a GPU: tests/gpu/test_memory.py."""

import gc
from collections.abc import Callable

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_automodel import DDPStrategy, FSDP2TPStrategy
from tests.gpu import test_memory
from tests.gpu.test_memory import LAYERS, Holding, Wide

WIDTH = 256
WEIGHT = WIDTH**2 * 4
"""Bytes of a layer's weight, of its gradient, and of a batch of activations."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_memory, "WIDTH", WIDTH)


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


def fit(module: type[Wide], strategy: type) -> None:
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy(),
        max_steps=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module(), DataLoader([torch.ones(WIDTH, WIDTH)] * 4, batch_size=None))  # type: ignore[arg-type]


def by_hand() -> None:
    module = Wide()
    optimizer, batch = module.configure_optimizers(), torch.ones(WIDTH, WIDTH)
    for _ in range(4):
        module.training_step(batch, 0).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_one_data_rank_holds_nothing_more() -> None:
    loop = peak(by_hand)
    assert loop > 2 * LAYERS  # weights, and activations or gradients
    assert peak(lambda: fit(Wide, FSDP2TPStrategy)) == loop
    assert peak(lambda: fit(Wide, DDPStrategy)) == loop + LAYERS  # buckets


def test_gradients_of_the_step_before_are_not_held() -> None:
    freed, held = (peak(lambda module=module: fit(module, FSDP2TPStrategy)) for module in (Wide, Holding))
    assert held - freed > LAYERS / 2
