"""Stands in for symmetric memory on CPU: torch's fallbacks of the fused operations, counted."""

from collections import Counter
from typing import Any

import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric


def fuse_on_cpu(calls: Counter[str]) -> None:
    """For the rest of the process; ``calls`` is filled with how often each fused operation ran, and its matmuls."""
    symmetric._is_test_mode = True
    dist.is_nccl_available = lambda: True  # the pass asks for it; a CPU build of torch has none

    def gather(shard: Any, weights: Any, dim: int, group: str, *, return_A: bool = True) -> Any:
        calls[f"gather for {len(weights)}"] += 1
        return symmetric._fused_all_gather_matmul_fallback(shard, weights, dim, group, return_A=return_A)

    def scatter(stream: Any, weight: Any, op: str, dim: int, group: str) -> Any:
        calls["scatter"] += 1
        return symmetric._fused_matmul_reduce_scatter_fallback(stream, weight, op, dim, group)

    symmetric.lib.impl("fused_all_gather_matmul", gather, "CPU")
    symmetric.lib.impl("fused_matmul_reduce_scatter", scatter, "CPU")
