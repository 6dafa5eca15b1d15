"""Fixtures that all tests share, and what an older torch cannot do."""

import gc
import os
import re
from collections.abc import Generator, Iterator

import pytest
import torch.distributed as dist

from lightning_automodel._compat.fsdp2.units import holds_several_dtypes
from lightning_automodel.distributed import logs
from lightning_automodel.testing.pool import ENVIRONMENT, Nursery, Pool

os.environ.setdefault("RES_OPTIONS", ENVIRONMENT["RES_OPTIONS"])  # for this process, and all that tests start
_OLDER = re.compile(r"RuntimeError: [^\n]*\b(?:before torch 2\.13|need torch 2\.13 or newer)[^\n]*")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Skip a test that ends in an error which names torch 2.13: an older one cannot do what is tested."""
    report = yield
    if report.failed and not holds_several_dtypes() and (found := _OLDER.search(report.longreprtext)):
        report.outcome, report.longrepr = "skipped", (str(item.path), (item.location[1] or 0) + 1, found.group())
    return report


def pytest_collection_finish() -> None:
    """Leave what was imported out of garbage collections from now on: each would walk through all of it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def unsaid() -> None:
    """Messages that appear once per process appear once per test."""
    logs._seen.clear()


@pytest.fixture(autouse=True)
def without_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `seed_everything` of another test has left does not reach this one, nor its ranks."""
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True, scope="module")
def without_groups_of_other_files() -> None:
    """End the process groups that a trainer of another file keeps, before a file's own fixtures plan or begin a run."""
    _end_groups()


@pytest.fixture(autouse=True)
def without_groups() -> None:
    """End what a trainer of another test keeps for the next trainer of this process."""
    _end_groups()


def _end_groups() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """The process that forks ranks; it starts with the first call."""
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture(scope="session")
def pool2(nursery: Nursery) -> Pool:
    """Runs functions on two gloo ranks; see `lightning_automodel.testing`."""
    return Pool(nursery, 2)


@pytest.fixture(scope="session")
def pool4(nursery: Nursery) -> Pool:
    """Runs functions on four gloo ranks; see `lightning_automodel.testing`."""
    return Pool(nursery, 4)
