"""Lets FSDP2 on CPU send gradients from where they were computed.

FSDP2 copies the gradients of a unit into a buffer, which it reduces. Of a unit of two, over dp_shard=2::

    computed     a = [a0 a1], b = [b0 b1]
    FSDP2        [a0 b0 a1 b1]  ->  GPU 0 [a0 b0], GPU 1 [a1 b1]
    here         GPU 0 [a0 b0], GPU 1 [a1 b1]        a message for each part
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from lightning_automodel._compat.fsdp2.units import parameter_groups

Scatter = Callable[[list[Tensor], list[Tensor], ProcessGroup, bool], None]
"""sums inputs [rows, ...] over the ranks, whose parts of them are outputs; divided by the ranks for a mean"""


def scatter_by(unit: FSDPModule, scatter: Scatter) -> None:
    """Make an FSDP2 unit reduce its gradients by ``scatter``, which returns when they are there; on CPU only."""
    for group in parameter_groups(unit):
        ranks = getattr(group.mesh_info, "shard_mesh_size", 1)
        if ranks > 1:  # else FSDP2 copies what it has collected
            group._reduce_scatter_comm = _ScattersInPlace(scatter, ranks)


class _ScattersInPlace:
    """torch's ``ReduceScatter``; FSDP2 asks it for a buffer for all gradients, and then for one for this rank's."""

    def __init__(self, scatter: Scatter, ranks: int) -> None:
        self.scatter, self.ranks = scatter, ranks
        self.to_be_filled = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return what stands for the first, or memory for the second, which stays with the parameters."""
        numel = math.prod(size)
        if numel * self.ranks == self.to_be_filled:
            self.to_be_filled = 0
            return torch.empty(numel, dtype=dtype, device=device)
        self.to_be_filled = numel
        return _Gradients(torch.empty(0, dtype=dtype, device=device))

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Reduce to sums or means; FSDP2 asks for others where it was given a factor, and gloo has none of them."""
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(
                f"{op}: gradients are summed or averaged over gloo; leave out set_gradient_divide_factor, or scale the "
                "loss by the factor"
            )
        assert isinstance(input_tensor, _Gradients)
        gradients = input_tensor.release()
        outputs, end = [], 0
        for gradient in gradients:
            row, rows = math.prod(gradient.shape[1:]), len(gradient)
            padded = -(-rows // self.ranks)
            own = max(0, min(padded, rows - group.rank() * padded))
            outputs.append(output_tensor[end : end + own * row])
            output_tensor[end + own * row : end + padded * row].zero_()  # replicas sum all of it
            end += padded * row
        self.scatter(outputs, gradients, group, op == dist.ReduceOp.AVG)


class _Gradients(Tensor):
    """Stands for the buffer that FSDP2 fills, and holds in its place the tensors that would be copied into it."""

    held: Sequence[Tensor] = ()

    @staticmethod
    def __new__(cls, empty: Tensor) -> "_Gradients":
        """Make one of the dtype of ``empty``."""
        return empty.as_subclass(cls)

    def release(self) -> list[Tensor]:
        """Return them, contiguous and of this dtype; this holds them no more."""
        if not self.held:
            raise RuntimeError(
                f"FSDP2 of torch {torch.__version__} collects gradients by an operation that is not known here, and "
                "over gloo they are sent without being collected; use torch 2.11 to 2.15, or DDPStrategy"
            )
        held, self.held = self.held, ()
        return [x.to(self.dtype).contiguous() for x in held]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do what FSDP2 does with its buffer."""
        handler = _HANDLERS.get(func)
        if handler is None:
            return super().__torch_function__(func, types, args, kwargs or {})
        return handler(*args, **(kwargs or {}))


def _collect(gradients: list[Tensor], dim: int, num_chunks: int, out: _Gradients) -> None:
    out.held = list(gradients)


def _divide(buffer: _Gradients, factor: float) -> _Gradients:
    buffer.held = [x.to(buffer.dtype) / factor for x in buffer.held]  # others may hold what the backward pass left
    return buffer


def _copy(buffer: _Gradients, other: _Gradients) -> _Gradients:
    buffer.held = other.release()
    return buffer


_COLLECTS = ("chunk_cat", "chunk_cat_mixed_dtype")
"""The latter from torch 2.15 on: of gradients of several dtypes."""

_HANDLERS: dict[Any, Callable[..., Any]] = {
    **{getattr(torch.ops.fsdp, name): _collect for name in _COLLECTS if hasattr(torch.ops.fsdp, name)},
    Tensor.view: lambda buffer, *shape: buffer,
    Tensor.div_: _divide,
    Tensor.copy_: _copy,  # behind torch 2.15: from another dtype
}
