"""Norms are those of one process, a slow rank is named, switches reach the strategy, traces can be read."""

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_automodel import DDPStrategy, FSDP2TPStrategy
from lightning_automodel.callbacks import Health, TraceProfiler
from lightning_automodel.testing.pool import Pool
from tests.callbacks.support import Dicts, loader, logged, train
from tests.support.training import Memory, make_trainer

SLOW = 0.5


class Sleepy(Dicts):
    """On rank 1 it dozes in every step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_rank == 1:
            time.sleep(SLOW)
        return super().training_step(batch, batch_idx)


def norms(strategy: Any, data_size: int, **arguments: Any) -> list[float]:
    _, _, memory = train(strategy, data_size, [Health()], **arguments)
    return logged(memory, "gradient_norm")


def compare_norms() -> list[list[float]]:
    found = [norms({"tp": 2}, 1), norms({"tp": 2}, 1, gradient_clip_val=0.1), norms(DDPStrategy(), 2)]
    return [*found, norms({"dp_shard": 2}, 2)]


@pytest.mark.long
def test_the_norm_of_the_gradients(pool2: Pool) -> None:
    split, clipped, replicated, sharded = pool2.run(compare_norms, trainer=True, timeout=110)[0]
    one = norms("auto", 1)
    assert split == pytest.approx(one, rel=1e-3)
    assert len(one) == 4
    assert clipped[0] == pytest.approx(one[0], rel=1e-3)  # before clipping
    assert replicated == pytest.approx(sharded, rel=1e-3)  # a mean of means over ranks with as many rows


def slow_ranks(directory: Path) -> tuple[list[str], list[float], list[str]]:
    """What is said of a rank that dozes, the ratio that is logged, and the traces of the same run."""
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logging.getLogger("lightning_automodel").addHandler(Keep())
    memory, health = Memory(), Health(slow_rank_every_n_steps=2, check_replicas_every_n_steps=3, nonfinite="skip")
    trace = TraceProfiler(first=3, count=1, dirpath=directory)
    strategy = FSDP2TPStrategy(dp_shard=2)
    run = make_trainer(strategy, max_epochs=1, log_every_n_steps=2, logger=memory, callbacks=[health, trace])
    run.fit(Sleepy(), loader(2))
    assert strategy.config.nonfinite == "skip"
    assert strategy.config.check_replicas_every_n_steps == 3
    events = [json.loads(path.read_text())["traceEvents"] for path in sorted(directory.glob("*.json"))]
    assert all(any(e.get("name") == "aten::mm" for e in every) for every in events)
    names = sorted(path.name for path in directory.glob("*.json"))
    return [line for line in said if "wait for rank" in line], logged(memory, "slowest_rank"), names


@pytest.mark.slow
def test_a_slow_rank_is_named(pool2: Pool) -> None:
    said, ratios, names = pool2.run(slow_ranks, trainer=True, with_directory=True, timeout=110)[0]
    assert len(said) == len(ratios) == 2
    assert all("all wait for rank 1 (" in line for line in said)
    assert all(ratio > 1.5 for ratio in ratios)
    assert "steps-3-3-rank-0.json" in names  # the other rank may not have written yet


def test_what_a_strategy_does_not_check_is_said() -> None:
    with pytest.warns(UserWarning, match="Health.nonfinite. is ignored: SingleDeviceStrategy"):
        train("auto", 1, [Health(nonfinite="skip")], max_steps=1)


def test_steps_are_counted_from_one() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        TraceProfiler(first=0)


def test_a_run_that_ends_within_a_trace_writes_it(tmp_path: Path) -> None:
    train("auto", 1, [TraceProfiler(first=2, count=9, dirpath=tmp_path)])
    (path,) = tmp_path.iterdir()
    assert path.name == "steps-2-10-rank-0.json"
    assert json.loads(path.read_text())["traceEvents"]
    assert not torch.autograd._profiler_enabled()
