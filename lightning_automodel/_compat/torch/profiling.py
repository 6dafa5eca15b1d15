"""Private names of torch's profilers: whether one is on, and the memory that CUDA's allocator remembers."""

import torch


def is_profiling() -> bool:
    """Tells whether torch's profiler is on in this process; it has one at a time, and no public question for it."""
    return torch.autograd._profiler_enabled()


def record_memory(entries: int | None) -> None:
    """Let CUDA's allocator remember so many allocations and where they were made; ``None``: no more.

    Documented under this private name (https://docs.pytorch.org/docs/stable/torch_cuda_memory.html).
    """
    if entries is None:
        torch.cuda.memory._record_memory_history(enabled=None)
    else:
        torch.cuda.memory._record_memory_history(max_entries=entries)


def write_memory(path: str) -> None:
    """Write what the allocator remembers, for https://docs.pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(path)
