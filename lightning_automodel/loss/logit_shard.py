"""A rank's shard of logits, and what the ranks find out together about all of them."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_automodel.distributed.collectives import gather, reduce_out, shard_bounds
from lightning_automodel.loss.cut_logits import CutLogits


@dataclass(frozen=True)
class LogitShard(CutLogits):
    """A rank's shard of logits, in the place of the vocabulary.

    Attributes:
        mesh: of one axis, whose ranks hold the shards.
    """

    mesh: DeviceMesh

    @property
    def start(self) -> int:
        """Compute the first id of the shard."""
        return shard_bounds(self.size, self.mesh.size(), self.mesh.get_local_rank())[0]

    @property
    def narrowest(self) -> int:
        """Compute the width of the narrowest shard of all ranks."""
        return shard_bounds(self.size, self.mesh.size(), self.mesh.size() - 1)[1]

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
