"""Ends the processes of a run together, where all of them meet the same mistake.

::

    rank 0    the mistake, one line -- waits for the others -- exits, and the store of the run with it
    rank 1         reading             the mistake -- exits        (else: an error about a rank that is gone)
"""

from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from lightning_automodel._compat.torch.groups import shared_store

_PATIENCE = timedelta(seconds=5)


def wait_for_others() -> None:
    """Waits on rank 0, for some seconds at most, until every rank of the run has called this."""
    if not dist.is_available() or not dist.is_initialized():
        return
    store = shared_store("mistake")
    with suppress(RuntimeError):  # one that meets no mistake never comes
        store.set(str(dist.get_rank()), "")
        if dist.get_rank() == 0:
            store.wait([str(rank) for rank in range(dist.get_world_size())], _PATIENCE)
