"""What FSDP2 sends over gloo: between pairs of ranks, to where it computes, and gradients from memory that is kept.

On CUDA torch keeps freed memory for the next request. On CPU it returns large buffers to the system, which hands them
out again page by page: of a step of two data ranks a quarter was that.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from lightning_automodel._compat.fsdp2 import fsdp_units, reduce_by
from lightning_automodel._compat.fsdp2_gathers import gather_by
from lightning_automodel._compat.tensors import holders_of
from lightning_automodel.distributed.pairwise import all_gather, goes_over_gloo, reduce_scatter


def communicate_over_gloo(model: nn.Module, mesh: DeviceMesh) -> None:
    """Make the units of ``model`` exchange between pairs of ranks, where their last axis goes over gloo."""
    if mesh.device_type != "cpu" or not goes_over_gloo(mesh.get_group(mesh.ndim - 1)):
        return
    memory = _KeptMemory()
    for unit in fsdp_units(model):
        gather_by(unit, all_gather)
        reduce_by(unit, _ReduceScatter(memory))


class _KeptMemory:
    """Buffers of gradients of units, handed out again as soon as nothing else holds them.

    As many of a size are kept as were ever in use at a time: two.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, torch.dtype], list[torch.UntypedStorage]] = {}

    def holds(self, numel: int, dtype: torch.dtype) -> bool:
        """Tell whether buffers of that size are kept."""
        return (numel, dtype) in self._kept

    def keep(self, numel: int, dtype: torch.dtype) -> None:
        """Let buffers of that size be kept from now on."""
        self._kept.setdefault((numel, dtype), [])

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a buffer [numel], with any values."""
        buffers = self._kept.setdefault((numel, dtype), [])
        free = next((buffer for buffer in buffers if holders_of(buffer) == 1), None)
        if free is None:
            free = torch.empty(numel, dtype=dtype).untyped_storage()
            buffers.append(free)
        return torch.empty(0, dtype=dtype).set_(free, 0, (numel,))  # type: ignore[call-overload]


class _ReduceScatter:
    """torch's ``ReduceScatter``, for CPU."""

    def __init__(self, memory: _KeptMemory) -> None:
        self.memory = memory

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for the gradients of a unit, or for this rank's part, which stays with the parameters."""
        numel = math.prod(size)
        return self.memory.take(numel, dtype) if self.memory.holds(numel, dtype) else torch.empty(numel, dtype=dtype)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Reduce to sums or means; FSDP2 asks for others where it was given a factor, and gloo has none of them."""
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(
                f"{op}: gradients are summed or averaged over gloo; leave out set_gradient_divide_factor, or scale the "
                "loss by the factor"
            )
        self.memory.keep(input_tensor.numel(), input_tensor.dtype)  # which is not the size that was gathered
        reduce_scatter(output_tensor, input_tensor, group)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())
