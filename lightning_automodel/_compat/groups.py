"""Private names of torch.distributed: the store over which processes have met, and the timeout of a process group."""

from datetime import timedelta

from torch.distributed import PrefixStore, ProcessGroup, Store, TCPStore
from torch.distributed.distributed_c10d import _get_default_store, _set_pg_timeout


def open_store(prefix: str) -> Store | None:
    """A connection of its own to the store of the default process group; ``None`` if the store cannot be shared.

    The one that torch uses is locked for as long as torch waits for a key. torch has no public way to it.
    """
    try:
        return PrefixStore(prefix, _get_default_store().clone())  # type: ignore[attr-defined]
    except (RuntimeError, NotImplementedError):  # stores of one process, as in torch's fake process group
        return None


def address_of(store: Store) -> tuple[str, int] | None:
    """Host and port of the process that keeps the store; ``None`` for stores on disk."""
    inner = store
    while isinstance(inner, PrefixStore):
        inner = inner.underlying_store
    return (inner.host, inner.port) if isinstance(inner, TCPStore) else None


def set_timeout(group: ProcessGroup, timeout: timedelta) -> None:
    """Of every collective that follows.

    ``init_device_mesh`` takes a timeout only within options of one backend, and else uses torch's default (30 minutes)
    whatever ``init_process_group`` was given.
    """
    _set_pg_timeout(timeout, group)
