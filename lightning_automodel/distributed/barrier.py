"""Waits until all ranks call the same function, and names those that do not."""

import time
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup

from lightning_automodel._compat.torch.groups import shared_store, timeout_of
from lightning_automodel.distributed.logs import logger

_WARN_AFTER = 10.0  # seconds
_meetings: dict[tuple[ProcessGroup, str], int] = {}


def meet(what: str, note: str, advice: str, timeout: timedelta | None = None) -> list[str]:
    """Return the ``note`` of every rank, when all have called this.

    Over the store of the run, so that a rank which is alone disturbs no collective of the others.

    Args:
        what: the function that is called, as its users know it.
        note: anything that the others should know.
        advice: for whom the others keep waiting.
        timeout: ``None``: that of collectives.

    Raises:
        RuntimeError: if some ranks do not come in time, naming them; the meeting can be called again.
    """
    world = dist.group.WORLD
    assert world is not None, "the processes have not met"
    count = _meetings.setdefault((world, what), 0)
    store = shared_store(f"lightning_automodel/{what}/{count}")
    ranks = range(dist.get_world_size())
    store.set(f"note/{dist.get_rank()}", note)
    store.add("arrived", 1)
    begin, has_warned = time.monotonic(), False
    limit = (timeout or timeout_of(world)).total_seconds()
    while store.add("arrived", 0) < len(ranks):
        waited = time.monotonic() - begin
        if waited > min(_WARN_AFTER, limit) and not has_warned:
            has_warned = True
            missing = [r for r in ranks if not store.check([f"note/{r}"])]
            logger.warning("%s", _message(what, missing, advice))
        if waited > limit:
            missing = [r for r in ranks if not store.check([f"note/{r}"])]
            store.add("arrived", -1)
            raise RuntimeError(f"{_message(what, missing, advice)} (waited {waited:.0f} s)")
        time.sleep(min(0.005 + waited / 10, 0.5))
    _meetings[world, what] = count + 1
    return [store.get(f"note/{rank}").decode() for rank in ranks]


def _message(what: str, missing: list[int], advice: str) -> str:
    who = ", ".join(map(str, missing))
    return f"rank {dist.get_rank()} waits in {what} for rank {who}: {advice}"
