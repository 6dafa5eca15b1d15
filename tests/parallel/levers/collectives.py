"""Counts the collectives of torch.distributed while they are dispatched."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

KINDS = {
    "allreduce_": "all-reduce",
    "allgather_": "all-gather",
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "allgather_into_tensor_coalesced_": "all-gather",
    "reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "all_gather": "all-gather",  # our own, over gloo
    "reduce_scatter": "reduce-scatter",
}


class Collectives(TorchDispatchMode):
    """Counts collectives, and the bytes of the larger of what goes in and what comes out, by axis, kind and pass."""

    def __init__(self, groups: dict[str, ProcessGroup]) -> None:
        super().__init__()
        self.names = {group.group_name: name for name, group in groups.items()}
        self.direction = "forward"
        self.found: dict[str, Counter[str]] = {"count": Counter(), "bytes": Counter()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "lightning_automodel"):
            group = next(x if isinstance(x, str) else ProcessGroup.unbox(x).group_name for x in args if _is_group(x))
            kind = KINDS[func._schema.name.split("::")[1]]
            key = f"{self.direction} {kind} {self.names.get(group, 'other')}"
            self.found["count"][key] += 1
            self.found["bytes"][key] += max(sum(x.nbytes for x in _tensors(value)) for value in args[:2])
        return func(*args, **(kwargs or {}))


def _is_group(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, tuple | list):
        return [x for entry in value for x in _tensors(entry)]
    return [value] if isinstance(value, Tensor) else []
