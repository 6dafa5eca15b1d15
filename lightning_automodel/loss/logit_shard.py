"""A rank's shard of logits, and what the ranks find out together about all of them."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_automodel.distributed.collectives import gather, reduce_out, shard_bounds


@dataclass(frozen=True)
class LogitShard:
    """A rank's shard of logits.

    Attributes:
        local: the shard.
        dim: its dimension that is cut.
        size: of that dimension as a whole.
        mesh: of one axis, whose ranks hold the shards.
    """

    local: Tensor
    dim: int
    size: int
    mesh: DeviceMesh

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the whole logits."""
        return (*self.local.shape[: self.dim], self.size, *self.local.shape[self.dim + 1 :])

    @property
    def start(self) -> int:
        """Compute the first id of the shard."""
        return shard_bounds(self.size, self.mesh.size(), self.mesh.get_local_rank())[0]

    @property
    def narrowest(self) -> int:
        """Compute the width of the narrowest shard of all ranks."""
        return shard_bounds(self.size, self.mesh.size(), self.mesh.size() - 1)[1]

    def is_at(self, dim: Any) -> bool:
        """Tells whether ``dim`` is the one that is cut."""
        return isinstance(dim, int) and dim % self.local.ndim == self.dim

    def last(self) -> Tensor:
        """Returns the shard with the vocabulary last: [..., vocab / tp]."""
        return self.local.movedim(self.dim, -1)

    def with_last(self, local: Tensor) -> "LogitShard":
        """Put logits back into the place of these, from a shard with the vocabulary last."""
        return replace(self, local=local.movedim(-1, self.dim))

    def collect(self, values: Tensor) -> Tensor:
        """Gather [..., n] of each rank to [..., n * tp], in the order of the ranks."""
        return gather(values, -1, values.shape[-1] * self.mesh.size(), self.mesh.get_group())

    def pick(self, ids: Tensor) -> Tensor:
        """Returns the logits of ``ids`` [..., n], which lead as the logits do; differentiable, plain."""
        local, columns = self.last(), ids - self.start
        held = (columns >= 0) & (columns < local.shape[-1])
        if local.shape[-1]:
            values = local.gather(-1, columns.masked_fill(~held, 0)).masked_fill(~held, 0)
        else:
            values = local.new_zeros(ids.shape) + local.sum(-1, keepdim=True)
        return reduce_out(values, self.mesh.get_group())

    def log_sum(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the log-sum-exp of ``values`` [..., vocab / tp] over all ranks, as the largest value and the
        logarithm of the sum of ``exp(value - largest)``; both [..., 1].
        """
        group = self.mesh.get_group()
        largest = values.new_full((*values.shape[:-1], 1), -torch.inf)
        if values.shape[-1]:
            largest = values.detach().amax(-1, keepdim=True)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        largest = largest.masked_fill(largest.isinf(), 0)
        return largest, reduce_out((values - largest).exp().sum(-1, keepdim=True), group).log()
