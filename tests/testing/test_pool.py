"""The pool of ranks: results, failures, deadlocks, clean ends, and Lightning inside it."""

import os
import random
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DDPStrategy

from lightning_automodel.testing.pool import ROOT, Nursery, Pool, PoolTimeout, RankFailed


def ranked(offset: int, *, scale: int) -> dict[str, torch.Tensor]:
    return {"value": torch.tensor(scale * (dist.get_rank() + offset))}


def summed_rank() -> float:
    value = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(value)
    return value.item()


def fail_on(rank: int) -> None:
    print(f"hello from {dist.get_rank()}")
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} says no")
    dist.barrier()


def fail_everywhere() -> None:
    raise ValueError("tp=3 does not divide 8")


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def wait_for_nobody(finished: int) -> None:
    if dist.get_rank() != finished:
        dist.recv(torch.zeros(1), src=finished)


def leave_traces() -> None:
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("error")
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir("/")


def state() -> tuple[torch.dtype, float, float, list[object], str | None, str]:
    filters: list[object] = list(warnings.filters)
    draws = torch.rand(1).item(), random.random()
    return torch.get_default_dtype(), *draws, filters, os.environ.get("LEFT_BEHIND"), os.getcwd()


def share(directory: Path) -> list[str]:
    (directory / str(dist.get_rank())).touch()
    dist.barrier()
    return sorted(path.name for path in directory.iterdir())


def start_child() -> tuple[int, int, int]:
    return os.getppid(), os.getpid(), subprocess.Popen(["sleep", "600"]).pid


def hang_with_child(directory: Path) -> None:
    (directory / str(os.getppid())).touch()
    (directory / str(os.getpid())).touch()
    time.sleep(600)


def fit(devices: int) -> tuple[bool, int, float]:
    started_without_group = not dist.is_initialized()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=DDPStrategy(),
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = BoringModel()
    trainer.fit(model)
    return started_without_group, trainer.world_size, model.layer.weight.sum().item()


def alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def await_end(pids: list[int], seconds: float = 10) -> list[int]:
    end = time.monotonic() + seconds
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < end:
        time.sleep(0.05)
    return left


def test_results_come_in_the_order_of_ranks(pool4: Pool) -> None:
    values = [result["value"].item() for result in pool4.run(ranked, 1, scale=10)]
    assert values == [10, 20, 30, 40]


@pytest.mark.parametrize(("pool", "total"), [("pool2", 1.0), ("pool4", 6.0)])
def test_all_reduce(pool: str, total: float, request: pytest.FixtureRequest) -> None:
    ranks: Pool = request.getfixturevalue(pool)
    assert ranks.run(summed_rank) == [total] * ranks.world_size


@pytest.mark.long
def test_ranks_are_executed_anew_where_a_fork_could_not_use_cuda() -> None:
    from tests.support.begins_cuda import module_and_sum  # here: the nursery of other tests imports this file

    nursery = Nursery()
    assert Pool(nursery, 2).run(module_and_sum) == [("rank.py", 1.0)] * 2
    nursery.close()


def test_a_failure_is_reported_while_other_ranks_wait(pool4: Pool) -> None:
    pool4.run(summed_rank)
    start = time.monotonic()
    with pytest.raises(RankFailed, match="ValueError: rank 2 says no") as raised:
        pool4.run(fail_on, 2)
    assert time.monotonic() - start < 5
    assert list(raised.value.failures) == [2]
    assert "in fail_on" in raised.value.failures[2]
    assert "hello from 3" in str(raised.value)
    assert pool4.run(summed_rank) == [6.0] * 4


def test_equal_failures_are_shown_once(pool2: Pool) -> None:
    with pytest.raises(RankFailed, match="tp=3 does not divide 8") as raised:
        pool2.run(fail_everywhere)
    assert set(raised.value.failures) <= {0, 1}
    assert str(raised.value).count("Traceback") == 1


def test_a_rank_that_dies_is_reported(pool2: Pool) -> None:
    with pytest.raises(RankFailed, match="SIGKILL") as raised:
        pool2.run(die_on, 1)
    assert 1 in raised.value.failures
    assert pool2.run(summed_rank) == [1.0] * 2


@pytest.mark.slow
def test_a_deadlock_shows_the_stacks_of_all_ranks(pool4: Pool) -> None:
    pool4.run(summed_rank)
    start = time.monotonic()
    with pytest.raises(PoolTimeout, match=r"no answer from rank 0, 2, 3 within 6 s") as raised:
        pool4.run(wait_for_nobody, 1, timeout=6)
    assert time.monotonic() - start < 12
    stacks = raised.value.stacks
    assert stacks.pop(1) == "finished"
    assert list(stacks) == [0, 2, 3]
    assert all("in wait_for_nobody" in text and text.rstrip() in str(raised.value) for text in stacks.values())
    assert pool4.run(summed_rank) == [6.0] * 4


def test_a_call_sees_nothing_of_an_earlier_one(pool2: Pool) -> None:
    before = pool2.run(state)
    pool2.run(leave_traces)
    assert pool2.run(state) == before
    assert before[0] == before[1]
    assert before[0][-1] == str(ROOT)


def test_the_directory_is_shared_by_the_ranks_of_a_call(pool2: Pool) -> None:
    assert pool2.run(share, with_directory=True) == [["0", "1"]] * 2
    assert pool2.run(share, with_directory=True) == [["0", "1"]] * 2


def test_a_trainer_makes_its_own_process_group(pool2: Pool) -> None:
    first, second = (pool2.run(fit, 2, trainer=True) for _ in range(2))
    assert first == second
    assert first[0] == first[1]
    assert first[0][:2] == (True, 2)


def test_no_process_outlives_its_call(nursery: Nursery) -> None:
    pids = [pid for result in Pool(nursery, 2).run(start_child) for pid in result]
    assert nursery.process is not None
    assert await_end(sorted(set(pids) - {nursery.process.pid})) == []


@pytest.mark.long
def test_no_process_outlives_the_nursery() -> None:
    nursery = Nursery()
    pids = [pid for result in Pool(nursery, 2).run(start_child) for pid in result]
    nursery.close()
    assert await_end(pids) == []


@pytest.mark.long
def test_no_process_outlives_a_killed_pytest(tmp_path: Path) -> None:
    scratch, pid_files = tmp_path / "scratch", tmp_path / "pids"
    scratch.mkdir()
    pid_files.mkdir()
    code = (
        "from pathlib import Path\n"
        "from lightning_automodel.testing.pool import Nursery, Pool\n"
        "from tests.testing.test_pool import hang_with_child\n"
        f"Pool(Nursery(), 2).run(hang_with_child, directory=Path({str(pid_files)!r}))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"TMPDIR": str(scratch)})
    try:
        end = time.monotonic() + 60
        while len(list(pid_files.iterdir())) < 3 and time.monotonic() < end:
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    pids = [int(path.name) for path in pid_files.iterdir()]
    assert len(pids) == 3
    assert await_end(pids) == []
