"""What ranks tell one another of names, so that all go on alike."""

from collections.abc import Iterable

import torch.distributed as dist


def names_of_any_rank(names: Iterable[str]) -> set[str]:
    """Collect the names that any rank gives; of one process its own. Collective."""
    found = [list(names)]
    if dist.is_initialized():
        mine, found = found[0], [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(found, mine)
    return {name for each in found for name in each}
