"""Gloo groups that torch makes run their collectives on one thread each, where two corrupt the memory of the process.

``ProcessGroupGloo`` takes collectives off a queue with two threads, and each writes the name of what it has completed
to one string of the group, behind no lock (``runLoop`` in torch's ``ProcessGroupGloo.cpp``). Names of 16 characters and
more are on the heap, ``ALLGATHER_COALESCED`` among them, which is every ``full_tensor()``: two threads that write at
once free it twice. With 20 such gathers in flight all of four plain torchrun scripts ended in SIGSEGV or SIGABRT within
100 seconds (torch 2.13; with 2.15 two of two in 45); with one thread each none of 87,000 gathers did. Steps of
training take as long so (0.99 to 1.02 of the time, tp=2 and dp_shard=2, hidden 64 and 256).
"""

import os
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta

from torch.distributed import ProcessGroupGloo, Store, distributed_c10d


class _Kind(type(ProcessGroupGloo)):  # type: ignore[misc]
    """Lets torch recognize every group of Gloo's by the class that stands in for theirs."""

    def __instancecheck__(cls, group: object) -> bool:
        return isinstance(group, ProcessGroupGloo)


class _OneThread(ProcessGroupGloo, metaclass=_Kind):
    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, **others: bool) -> None:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        for name, value in others.items():  # torch 2.15 has enable_reconfigure in both places
            setattr(options, name, value)
        options._timeout = timeout
        options._threads = 1
        options._devices = _devices()
        super().__init__(store, rank, size, options)


def _devices() -> list[ProcessGroupGloo.Device]:
    """List what torch would choose by itself; it asks the environment only where it makes the options."""
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME")
    if not interfaces:
        return [ProcessGroupGloo.create_default_device()]
    return [ProcessGroupGloo.create_device(interface=name) for name in interfaces.split(",")]


@contextmanager
def gloo_in_order() -> Generator[None, None, None]:
    """Makes the Gloo groups that torch makes within this context complete one collective after the other.

    For loops of one's own on CPUs, around ``torch.distributed.init_process_group``; groups of NCCL are not touched.
    """
    original = distributed_c10d.ProcessGroupGloo
    distributed_c10d.ProcessGroupGloo = _OneThread  # type: ignore[misc]
    try:
        yield
    finally:
        distributed_c10d.ProcessGroupGloo = original  # type: ignore[misc]
