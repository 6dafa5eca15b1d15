"""Norms of gradients and parameters that Megatron-FSDP holds in rows of slices: each element counts once."""

import math
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_automodel.gradients import scale_, to_local_if_dtensor


class Norms:
    """Measures what several ranks hold.

    Args:
        parameters: of the optimizer, by name.
        copies: how many ranks hold what this one has of each.
        mesh: of the data ranks, on which the parameters are DTensors.
        tp_size: number of ranks that hold slices of matrices.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], copies: Mapping[Tensor, int], mesh: DeviceMesh, tp_size: int
    ) -> None:
        self._parameters, self._copies, self._mesh, self._tp_size = parameters, copies, mesh, tp_size
        self._by_memory: dict[tuple[int, int], int] = {}

    def total_norm(self, parameters: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
        """Computes the norm of all gradients taken as one vector, each element once: a float32 scalar. Collective.

        Ranks may hold no gradient at all, so every rank takes part whatever it holds.
        """
        total = self.power(parameters, norm_type)
        dist.all_reduce(total)
        return total ** (1 / norm_type)

    def power(self, parameters: Iterable[Tensor], norm_type: float) -> Tensor:
        """Compute this rank's term of the sum over ``|g| ** norm_type``."""
        total = torch.zeros((), device=torch.device(self._mesh.device_type))
        for parameter in parameters:
            if parameter.grad is not None:
                power = to_local_if_dtensor(parameter.grad).float().norm(norm_type) ** norm_type
                total = total + power / self._copies[parameter]
        return total

    def norm_of(self, tensor: Tensor, norm_type: float) -> Tensor | None:
        """Computes the norm of one parameter or gradient over all ranks; ``None`` for a tensor that is neither.

        Collective. A DTensor knows the data ranks alone: its own norm is that of this rank's slice of tp.
        """
        if not isinstance(tensor, DTensor) or tensor.device_mesh != self._mesh:
            return None
        local, memory = to_local_if_dtensor(tensor).float(), _memory(tensor)
        if memory not in self._by_memory:
            self._by_memory = self._copies_by_memory()
        copies = self._by_memory.get(memory)
        if local.numel() and copies is None:
            raise ValueError(
                f"the norm of a tensor of shape {tuple(tensor.shape)}, which tp={self._tp_size} may have cut, "
                "would be that of a part; take it of a parameter or a gradient itself, and scale the norm"
            )
        if math.isinf(norm_type):
            largest = local.abs().amax() if local.numel() else local.new_zeros(())
            dist.all_reduce(largest, dist.ReduceOp.MAX)
            return largest
        power = local.norm(norm_type) ** norm_type
        total = power.detach() / (copies or 1)
        dist.all_reduce(total)
        return (total + (power - power.detach())) ** (1 / norm_type)  # each copy has the whole derivative

    def _copies_by_memory(self) -> dict[tuple[int, int], int]:
        """Tell how many ranks hold a parameter or gradient, by its memory: ``parameter.grad.data`` is a new object."""
        found = {}
        for parameter in self._parameters.values():
            for tensor in (parameter, parameter.grad):
                if tensor is not None:
                    found[_memory(tensor)] = self._copies[parameter]
        return found

    def clip(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        """Scales gradients in place so that their norm is at most ``max_norm``; returns the norm before."""
        parameters = list(parameters)
        norm = self.total_norm(parameters)
        scale_((p.grad for p in parameters if p.grad is not None), torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm


def _memory(tensor: Tensor) -> tuple[int, int]:
    local = to_local_if_dtensor(tensor.detach())
    return local.data_ptr(), local.numel()
