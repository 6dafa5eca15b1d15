"""Skips this folder where there is no CUDA device, and lets no process group outlive its test."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

HERE = Path(__file__).resolve().parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if HERE in item.path.resolve().parents:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def ends_its_groups() -> Iterator[None]:
    """A trainer keeps the groups of this process for the next one; a test that makes its own would meet them."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
