"""Compares tensors that are to be equal on all ranks of a group, by a checksum of their bits."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_automodel.distributed.arriving import Arriving
from lightning_automodel.distributed.logs import warn_once

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """Tensors by name that the ranks of ``group`` hold alike.

    Attributes:
        axis: what the ranks are called, as in "tp".
        group: of these ranks.
        tensors: equal on all of them, or shards of what is.
        shards_over: ranks whose shards make the whole tensors; ``None``: each tensor is compared by itself.
    """

    axis: str
    group: ProcessGroup
    tensors: Mapping[str, Tensor]
    shards_over: ProcessGroup | None = None


class Comparison:
    """Compares checksums of replicas: begun without a wait for the device, looked at when they arrive. Collective."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        sums = checksums(replicas.tensors.values())
        if replicas.shards_over is not None:
            dist.all_reduce(sums, group=replicas.shards_over)
        ranks = [torch.empty_like(sums) for _ in range(replicas.group.size())]
        dist.all_gather(ranks, sums, group=replicas.group)
        self._arriving = Arriving(torch.stack(ranks))  # [ranks, tensors]

    def finish(self) -> None:
        """Wait for the sums, and raise if they differ.

        Raises:
            ValueError: naming a tensor, and the ranks that hold other bits than the first one. On accelerators, where
                sums may be added up in another order, a difference of rounding is a warning.
        """
        sums = self._arriving.read()
        different = (sums != sums[0]).any(0)
        if not different.any():
            return
        names = [name for name, differs in zip(self._replicas.tensors, different.tolist(), strict=True) if differs]
        errors = {name: self._error(self._replicas.tensors[name]) for name in names}
        worst = max(names, key=lambda name: errors[name])
        place = list(self._replicas.tensors).index(worst)
        others = [i for i, row in enumerate(sums) if row[place] != sums[0][place]]
        text = _text(self._replicas.axis, worst, others, errors[worst], len(names), len(self._replicas.tensors))
        if errors[worst] > _bound(self._replicas.tensors[worst]):
            raise ValueError(text)
        warn_once(f"of the size of rounding: {text}")

    def _error(self, tensor: Tensor) -> float:
        """Returns the largest relative difference from the first rank's, now; infinite where ranks hold shards."""
        group = self._replicas.group
        if self._replicas.shards_over is not None:
            return float("inf")
        own = tensor.detach().double()
        first = own.clone()
        dist.broadcast(first, group=group, group_src=0)
        error = (own - first).norm() / first.norm().clamp(min=1e-30)
        dist.all_reduce(error, dist.ReduceOp.MAX, group=group)
        return error.item()


def checksums(tensors: Iterable[Tensor]) -> Tensor:
    """Return sums of the bits of each of ``tensors``: int64 [tensors]."""
    return torch.stack([_checksum(tensor) for tensor in tensors])


def _checksum(tensor: Tensor) -> Tensor:
    """Returns the sum of the bits of all elements: int64, the same however the elements are cut into shards."""
    return tensor.detach().view(INTEGERS[tensor.element_size()]).sum(dtype=torch.int64)


def _bound(tensor: Tensor) -> float:
    if tensor.device.type == "cpu":
        return -1.0
    return 1e-5 if tensor.element_size() >= 4 else 1e-2


def _text(axis: str, name: str, others: list[int], error: float, different: int, count: int) -> str:
    size = "" if error == float("inf") else f", by {error:.1e} of its norm"
    return (
        f"{name} is to be equal on all ranks of the {axis} axis, but rank {', '.join(map(str, others))} of it holds "
        f"other values than rank 0{size} ({different} of {count} such parameters differ): the ranks have trained "
        "different models. Go on from the last checkpoint before, with check_replicas_every_n_steps=1 in the config, "
        "which finds the step. Causes: batches that differ between these ranks, gradients or parameters that a hook "
        "changes on some of them, or numbers that a training_step draws beside the model and that reach the loss (draw "
        "them from a generator that is seeded alike on these ranks)"
    )
