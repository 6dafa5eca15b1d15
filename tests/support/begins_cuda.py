"""Begins CUDA when it is imported, as far as torch says so without a device; packages do that where there is one."""

import sys

import torch
import torch.distributed as dist

if sys.argv[0].endswith(("nursery.py", "rank.py")):  # and not for pytest
    torch.cuda.is_initialized = lambda: True


def module_and_sum() -> tuple[str, float]:
    """Runs on each rank: which module its process was started with, and the sum of the ranks."""
    value = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(value)
    return sys.argv[0].rpartition("/")[2], value.item()
