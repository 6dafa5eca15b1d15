"""Trainers that follow one another in the same processes leave nothing behind: threads, files, memory."""

import gc
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_automodel import DDPStrategy, FSDP2TPStrategy
from lightning_automodel.testing.pool import Pool
from tests.support.training import Recorder, batches, make_trainer


def held() -> tuple[int, int]:
    """Threads and open files of this process, the fewest of some moments: a thread may just be ending."""
    gc.collect()
    threads, files = [], []
    for _ in range(10):
        threads.append(len(os.listdir("/proc/self/task")))
        files.append(len(os.listdir("/proc/self/fd")))
        time.sleep(0.02)
    return min(threads), min(files)


def resident() -> int:
    """Memory of this process in MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 2**20


def train_often(count: int, directory: Path) -> list[tuple[int, int, int]]:
    """Runs on each rank: threads, files and memory after each of ``count`` trainers."""
    found = []
    for i in range(count):
        split = FSDP2TPStrategy(tp=2, async_save=True)
        run = make_trainer(DDPStrategy() if i % 2 else split, max_steps=1)
        run.fit(Recorder(), batches(2 if i % 2 else 1))
        if i < 3:
            run.save_checkpoint(directory / str(i))
            run.strategy._background.wait()
        del run, split
        found.append((*held(), resident()))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("count", [10, pytest.param(50, marks=[pytest.mark.long, pytest.mark.timeout(400)])])
def test_threads_and_files_stay_those_of_two_trainers(count: int, pool2: Pool, tmp_path: Path) -> None:
    for found in pool2.run(train_often, count, tmp_path, trainer=True, timeout=6.0 * count):
        threads, files = zip(*[after[:2] for after in found], strict=True)
        assert max(threads[2:]) <= threads[1]
        assert max(files[2:]) <= files[1]
        assert found[-1][2] - found[1][2] < 32


class Failing(Recorder):
    """Raises an error in its second step."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error: Exception | None = error

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        if batch_idx == 1 and self.error is not None:
            raise self.error
        return super().training_step(batch, batch_idx)


def fail(error: Exception) -> tuple[Failing, Any]:
    module, run = Failing(error), make_trainer({"tp": 2}, max_steps=3)
    with pytest.raises(type(error)):
        run.fit(module, batches(1))
    return module, run.strategy.device_mesh


def fail_and_go_on() -> dict[str, Any]:
    """Runs on each rank: the groups of a run go on if all ranks failed alike, and else they end with it."""
    module, mesh = fail(ValueError("on all ranks"))
    module.error = None
    again = make_trainer({"tp": 2}, max_steps=1)
    again.fit(module, batches(1))
    assert again.strategy.device_mesh is mesh
    before, kinds = [], (ValueError, TypeError)
    for _ in range(3):
        module, mesh = fail(kinds[int(os.environ["RANK"])]("on one rank"))
        before.append(held())
    run = make_trainer({"tp": 2}, max_steps=1)
    with pytest.raises(ValueError, match="build a new LightningModule, and go on from a checkpoint"):
        run.fit(module, batches(1))
    fresh = Recorder()
    run = make_trainer({"tp": 2}, max_steps=1)
    run.fit(fresh, batches(1))
    assert run.strategy.device_mesh is not mesh
    del module
    return {"held": [*before[1:], held()], "losses": fresh.losses}


def fail_apart() -> None:
    """End a run differently on different ranks."""
    kinds = (ValueError, TypeError)
    failing, run = Failing(kinds[int(os.environ["RANK"]) % 2]("here")), make_trainer({"dp_shard": 2, "tp": 2})
    with pytest.raises(kinds):
        run.fit(failing, batches(2))


def meet_again() -> None:
    """Let the processes part, and meet at another port, with one group more before all others."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = torch.tensor(free.getsockname()[1])
    dist.broadcast(port, 0)
    dist.destroy_process_group()
    os.environ.update(MASTER_PORT=str(port.item()), TORCHELASTIC_USE_AGENT_STORE="False")
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    dist.new_group()


def train_anew(end_groups: Callable[[], None], directory: Path) -> tuple[list[float], list[float]]:
    """Runs on each rank: losses of a run before ``end_groups``, and of one behind it."""
    losses = []
    for attempt in ("before", "behind"):
        fresh = Recorder()
        run = make_trainer({"dp_shard": 2, "tp": 2}, max_steps=2, gradient_clip_val=0.1)
        run.fit(fresh, batches(2))
        run.save_checkpoint(directory / attempt)
        run.validate(fresh, batches(2))
        losses.append(fresh.losses)
        if attempt == "before":
            end_groups()
    return losses[0], losses[1]


@pytest.mark.slow
@pytest.mark.parametrize("end_groups", [fail_apart, meet_again])
def test_the_run_behind_the_end_of_all_groups(end_groups: Callable[[], None], pool4: Pool, tmp_path: Path) -> None:
    for before, behind in pool4.run(train_anew, end_groups, tmp_path, trainer=True):
        assert behind == before


@pytest.mark.slow
def test_a_run_that_fails(pool2: Pool) -> None:
    for found in pool2.run(fail_and_go_on, trainer=True):
        assert len(set(found["held"])) == 1
        assert torch.tensor(found["losses"]).isfinite().all()
