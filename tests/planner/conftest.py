"""The planner plays ranks in a process without process groups; tests before may have left some."""

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def without_groups() -> None:
    """End what a trainer of another test keeps for the next trainer of this process."""
    if dist.is_initialized():
        dist.destroy_process_group()
