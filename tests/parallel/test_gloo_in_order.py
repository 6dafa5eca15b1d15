"""Groups of Gloo's complete one collective after the other: two threads of a group corrupt the memory of a process."""

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_automodel._compat.torch.groups import existing_groups, timeout_of
from lightning_automodel.mesh import build_mesh, gloo_in_order, resolve_sizes
from lightning_automodel.testing.pool import Pool
from tests.support.layouts import LAYOUTS
from tests.support.training import Recorder, batches, make_trainer

TIMEOUT = timedelta(seconds=50)


def threads_of_groups() -> set[int]:
    return {group._get_backend(torch.device("cpu")).options._threads for group in existing_groups()}


def of_strategy(layout: str) -> tuple[int, set[int], set[timedelta]]:
    """Runs on each rank: the number of groups that a run makes, their threads, and timeouts of those with peers."""
    strategy = LAYOUTS[layout].make(timeout=TIMEOUT)
    make_trainer(strategy, max_steps=1).fit(Recorder(), batches(LAYOUTS[layout].data_size))
    groups = existing_groups()
    return len(groups), threads_of_groups(), {timeout_of(group) for group in groups if group.size() > 1}


@pytest.mark.parametrize("layout", ["fsdp2-tp2", "fsdp2-dp2", "ddp-2", "megatron3-dp2"])
def test_groups_of_strategies(layout: str, pool2: Pool) -> None:
    for number, threads, timeouts in pool2.run(of_strategy, layout, trainer=True):
        assert number > 1
        assert threads == {1}
        assert timeouts == {TIMEOUT}


def of_mesh() -> tuple[set[int], set[int]]:
    """Runs on each rank: threads of the groups of a mesh, and of one that is made behind it."""
    build_mesh(resolve_sizes(2, tp=2), "cpu")
    before, own = threads_of_groups(), dist.new_group([0, 1])
    return before, {own._get_backend(torch.device("cpu")).options._threads}


def test_groups_of_meshes(pool2: Pool) -> None:
    for ours, theirs in pool2.run(of_mesh):
        assert ours == {1}
        assert theirs == {2}, "what torch makes for others stays as it was"


def gather_at_once(seconds: float) -> int:
    """Runs on each rank: DTensor's gathers, 20 at a time, in a group of this context's."""
    with gloo_in_order():
        group: Any = dist.new_group([0, 1])
    operations, shards = torch.ops._c10d_functional, [torch.full((8, 4), float(i)) for i in range(20)]
    begun, rounds = time.monotonic(), 0
    while True:
        wholes = [operations.all_gather_into_tensor(shard, 2, group.group_name) for shard in shards]
        for i, whole in enumerate(wholes):
            assert operations.wait_tensor(whole).eq(i).all()
        rounds += 1
        has_ended = torch.tensor(time.monotonic() - begun > seconds, dtype=torch.int32)
        dist.all_reduce(has_ended, dist.ReduceOp.MAX)
        if has_ended:
            return rounds


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [20.0, pytest.param(300.0, marks=[pytest.mark.long, pytest.mark.timeout(400)])])
def test_many_gathers_at_once(seconds: float, pool2: Pool) -> None:
    """By the threads that torch gives a group, two of three runs of 20 seconds ended in SIGSEGV or SIGABRT."""
    for rounds in pool2.run(gather_at_once, seconds, timeout=seconds + 60):
        assert rounds > 100
