"""Chooses the dim of a parameter that FSDP2 cuts."""

from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import DTensor, Shard

from lightning_automodel._compat.dtensor.tensors import StridedShard


@dataclass(frozen=True)
class DimToCut:
    """Chooses dim 0 for FSDP2, unless that holds stacked matrices of which tensor parallelism has cut each.

    No placement describes a second cut of what is left of them::

        gate 0 1 2 3, up 4 5 6 7     tp rank 0: 0 1 4 5     its data ranks, on dim 0: 0 1 | 4 5     on dim 1: columns

    What FSDP2 records for dim 0, DTensor reads as other rows.

    Attributes:
        size: number of data shards.
    """

    size: int

    def __call__(self, parameter: nn.Parameter) -> Shard | None:
        """Return ``None`` for dim 0.

        Raises:
            ValueError: if no other dim can be cut evenly, as FSDP2 wants it.
        """
        placements = parameter.placements if isinstance(parameter, DTensor) else ()
        if not any(isinstance(placement, StridedShard) and placement.dim == 0 for placement in placements):
            return None
        for dim, features in enumerate(parameter.shape):
            if dim > 0 and features % self.size == 0:
                return Shard(dim)
        raise ValueError(
            f"a plan splits stacked matrices of shape {tuple(parameter.shape)} (packed_colwise), of which FSDP2 can "
            f"cut columns only, and {self.size} data shards do not divide them; use another dp_shard, or give the "
            "module 'replicate' in tp_plan"
        )
