"""The planner plays ranks in a process without process groups; tests before may have left some."""

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True, scope="module")
def without_groups_of_other_files() -> None:
    """End them before a file's own fixtures play ranks."""
    _end_groups()


@pytest.fixture(autouse=True)
def without_groups() -> None:
    """End what a trainer of another test keeps for the next trainer of this process."""
    _end_groups()


def _end_groups() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
