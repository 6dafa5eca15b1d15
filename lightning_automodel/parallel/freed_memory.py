"""On CPU, memory that is freed stays with the process for its next request, as on CUDA.

glibc returns what is free at the end of its heap to the system, which hands it out again page by page, each filled with
zeros first: in a step of two data ranks 70,000 times. Larger requests than 32 MiB are mapped apart (mallopt(3)), and go
back at once. What FSDP2 gathers comes from the heap all the same, since the next unit asks for as much: a step of
dp_shard=2 at hidden 2048 asks for 60,000 pages in the place of 270,000, and takes 4.6 s in the place of 5.2, in as much
memory. All from the heap it would take 2.6 GB in the place of 2.1: too much for that.
"""

import ctypes
import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager

_LIBC = ctypes.CDLL(None)
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # of <malloc.h>
_MMAPS_OF_GLIBC = 65536  # its default
_NEVER, _LARGEST = -1, 32 * 2**20
_CHOICES_OF_USERS = (
    "GLIBC_TUNABLES",
    *(f"MALLOC_{x}_" for x in ("TRIM_THRESHOLD", "MMAP_THRESHOLD", "MMAP_MAX", "TOP_PAD")),
)


@functools.cache
def keep_freed_memory() -> bool:
    """Keep it, in this process; return whether that is so now. Not where the environment sets glibc's thresholds, and
    not with another C library.
    """
    mallopt = getattr(_LIBC, "mallopt", None)
    if mallopt is None or any(name in os.environ for name in _CHOICES_OF_USERS):
        return False
    return bool(mallopt(_TRIM_THRESHOLD, _NEVER) and mallopt(_MMAP_THRESHOLD, _LARGEST))


@contextmanager
def from_what_was_freed() -> Iterator[None]:
    """Allocate large memory, too, where what is freed stays, if any does."""
    if not keep_freed_memory():
        yield
        return
    _LIBC.mallopt(_MMAP_MAX, 0)
    try:
        yield
    finally:
        _LIBC.mallopt(_MMAP_MAX, _MMAPS_OF_GLIBC)
