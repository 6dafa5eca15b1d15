"""Gathers tensors of which ranks do not know each other's shape and dtype, or whether there is one."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

_MOST_DIMS = 64  # torch's
_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


def gather_unlike(value: Tensor | None, group: ProcessGroup, device: torch.device) -> list[Tensor | None]:
    """Return what each rank of ``group`` has, in the order of its ranks. Collective; the host waits for it.

    Args:
        value: of any shape and dtype, on ``device``; ``None``: this rank has nothing.
        group: all of which call this.
        device: on which its ranks send.
    """
    heads = [torch.zeros(2 + _MOST_DIMS, dtype=torch.int64, device=device) for _ in range(group.size())]
    dist.all_gather(heads, _head(value).to(device), group=group)
    kinds = [_read_head(head) for head in torch.stack(heads).tolist()]
    counts = [0 if kind is None else kind[0].itemsize * kind[1].numel() for kind in kinds]
    sent = torch.zeros(max(counts), dtype=torch.uint8, device=device)
    if value is not None:
        own = sent[: value.numel() * value.element_size()].view(value.dtype)
        own.copy_(value.detach().reshape(-1))
    received = [torch.empty_like(sent) for _ in counts]
    if max(counts):
        dist.all_gather(received, sent, group=group)
    return [
        None if kind is None else data[:count].view(kind[0]).view(kind[1])
        for kind, data, count in zip(kinds, received, counts, strict=True)
    ]


def _head(value: Tensor | None) -> Tensor:
    """Describe ``value``: 1 + its dtype's number, its dimensions, its shape; zeros for nothing."""
    head = torch.zeros(2 + _MOST_DIMS, dtype=torch.int64)
    if value is not None:
        numbers = [1 + _DTYPES.index(value.dtype), value.ndim, *value.shape]
        head[: len(numbers)] = torch.tensor(numbers)
    return head


def _read_head(head: list[int]) -> tuple[torch.dtype, torch.Size] | None:
    dtype, dims, *shape = head
    return (_DTYPES[dtype - 1], torch.Size(shape[:dims])) if dtype else None
