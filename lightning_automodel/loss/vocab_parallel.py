"""Numbers over a vocabulary of which each rank holds a shard: token losses and entropy, as autograd functions.

Everything is computed in float32 (float64 for float64 logits), row block by row block, so that no second array of the
size of the logits exists in the forward pass. One all-reduce finds the maximum of each row, one sums the rest.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from lightning_automodel._compat.dtensor.gradients import to_local
from lightning_automodel._compat.torch.tensors import assert_async, is_transformed
from lightning_automodel.distributed.collectives import copy_in, reduce_out, shard_bounds
from lightning_automodel.distributed.second_order import is_differentiated, refuse_second_order
from lightning_automodel.loss.passes import Passes
from lightning_automodel.loss.rounds import rounds

_ON_CPU, _ON_DEVICES, _COMPILED = 1 << 22, 1 << 25, 1 << 28
"""Elements that are widened at a time: 16 MiB in float32, which stay near a processor; 128 MiB, for which kernels take
longer than the host takes to start them (with 16 MiB an H200 waited for 40 of 1,104 ms per step of 8192 tokens).
Compiled passes write none of them; what bounds them is a backend that does.
"""


@dataclass(frozen=True)
class VocabShard:
    """The shard of the vocabulary that this rank holds.

    Attributes:
        size: of the whole vocabulary.
        start: first id of the shard.
        group: the ranks that hold the vocabulary together; ``None``: this rank holds all of it.
    """

    size: int
    start: int = 0
    group: ProcessGroup | None = None

    @classmethod
    def of(cls, size: int, group: ProcessGroup | None) -> "VocabShard":
        """Computes this rank's shard, cut as DTensor cuts."""
        return cls(size, shard_bounds(size, group.size(), group.rank())[0], group) if group else cls(size)

    def limited(self, size: int) -> "VocabShard":
        """Limits the shard to a vocabulary of which only the first ``size`` ids count."""
        return replace(self, size=size)

    def reduce(self, value: Tensor, operation: Any = dist.ReduceOp.SUM) -> Tensor:
        """Combines ``value`` over the group, in place."""
        if self.group is not None:
            dist.all_reduce(value, operation, group=self.group)
        return value

    def maximum(self, logits: Tensor) -> Tensor:
        """Finds the largest logit of each row, [tokens], widened."""
        if logits.shape[-1]:
            values = logits.amax(-1).to(wide(logits))
        else:
            values = logits.new_full(logits.shape[:1], -torch.inf, dtype=wide(logits))
        return self.reduce(values, dist.ReduceOp.MAX)

    def find(self, targets: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Find the columns of ``targets`` [tokens] in a shard of ``width`` columns (else 0), and which targets it
        holds.
        """
        local = targets - self.start
        held = (local >= 0) & (local < width)
        return local.masked_fill(~held, 0), held

    def pick(self, logits: Tensor, targets: Tensor, offset: Tensor) -> Tensor:
        """Reads ``logits[i, targets[i]] - offset[i]``, [tokens], widened; 0 where another rank holds the target."""
        if not logits.shape[-1]:
            return torch.zeros_like(offset)
        local, held = self.find(targets, logits.shape[-1])
        picked = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1) - offset
        return picked.masked_fill_(~held, 0)

    def subtract(self, values: Tensor, targets: Tensor, amounts: Tensor) -> None:
        """Subtracts ``amounts[i]`` from ``values[i, targets[i]]`` in place, where this rank holds the target."""
        if values.shape[-1]:
            local, held = self.find(targets, values.shape[-1])
            values.scatter_add_(-1, local.unsqueeze(-1), -(amounts * held).unsqueeze(-1))


@dataclass(frozen=True)
class SmoothedLoss:
    """Cross entropy of rows of logits, in the steps between which ranks and blocks of rows are combined.

    Attributes:
        shard: which shard of the vocabulary the logits are.
        smoothing: share of the target that is spread evenly over the vocabulary.
        passes: over the logits, compiled; ``None``: kernel by kernel.
    """

    shard: VocabShard
    smoothing: float
    passes: Passes | None = None

    def start(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Starts sums of logits minus the largest of their row: of exp, of the target, of all."""
        maximum = self.shard.maximum(logits)
        sums = maximum.new_zeros((3 if self.smoothing else 2, logits.shape[0]))
        sums[1] = self.shard.pick(logits, targets, maximum)
        return maximum, sums

    def passes_over(self, logits: Tensor) -> Passes | None:
        """Returns the compiled passes, unless they fail, or this rank holds no part of the vocabulary."""
        return None if self.passes is None or self.passes.fail or not logits.shape[-1] else self.passes

    def exponentiate(self, shifted: Tensor, sums: Tensor) -> None:
        """Replaces logits minus their maximum by their exponentials, and writes their ``sums``."""
        if self.smoothing:
            sums[2] = shifted.sum(-1)
        sums[0] = shifted.exp_().sum(-1)

    def add_up(self, logits: Tensor, maximum: Tensor, sums: Tensor) -> None:
        """Writes ``sums`` as :meth:`exponentiate` does, of logits that stay as they are."""
        passes = self.passes_over(logits)
        if passes is None:
            self.exponentiate(logits - maximum[:, None], sums)
            return
        # Detached: what requires gradients would be compiled apart.
        sums[0], all_of_row = passes.add_up(logits.detach(), maximum, self.smoothing > 0)
        if all_of_row is not None:
            sums[2] = all_of_row

    def losses(self, sums: Tensor) -> Tensor:
        """Computes losses [rows] from sums over the whole vocabulary."""
        losses = sums[0].log() - (1 - self.smoothing) * sums[1]
        return losses - self.smoothing / self.shard.size * sums[2] if self.smoothing else losses

    def differentiate(self, exponentials: Tensor, targets: Tensor, sums: Tensor, weights: Tensor) -> None:
        """Replaces exponentials by the gradient of ``sum(weights * losses)``; ``sums`` are those of exp, [rows]."""
        exponentials *= (weights / sums)[:, None]
        if self.smoothing:
            exponentials -= (weights * self.smoothing / self.shard.size)[:, None]
        self.shard.subtract(exponentials, targets, (1 - self.smoothing) * weights)

    def write_gradient(
        self, logits: Tensor, targets: Tensor, maximum: Tensor, sums: Tensor, weights: Tensor, out: Tensor
    ) -> None:
        """Writes what :meth:`differentiate` does to ``out``, which may be the logits."""
        passes = self.passes_over(logits)
        if passes is None:
            values = (logits - maximum[:, None]).exp_()
            self.differentiate(values, targets, sums, weights)
            out.copy_(values)
            return
        columns, held = self.shard.find(targets, logits.shape[-1])
        spread = weights * self.smoothing / self.shard.size if self.smoothing else None
        logits = logits if out is logits else logits.detach()  # not two views of one memory
        passes.write_gradient(
            logits, maximum, weights / sums, spread, columns, (1 - self.smoothing) * weights * held, out
        )

    def gradient(self, logits: Tensor, targets: Tensor, maximum: Tensor, weights: Tensor) -> Tensor:
        """Compute the gradient of ``sum(weights * losses)`` [rows, vocab / tp] so that it has a gradient itself."""
        values = (logits - maximum[:, None]).exp()
        sums = values.sum(-1)
        if self.shard.group is not None:
            sums = copy_in(reduce_out(sums, self.shard.group), self.shard.group)
            weights = copy_in(weights, self.shard.group)
        values = values * (weights / sums)[:, None] - (weights * self.smoothing / self.shard.size)[:, None]
        self.shard.subtract(values, targets, (1 - self.smoothing) * weights)
        return values.to(logits.dtype)


class Ungathered(Tensor):
    """Logits that are computed in parts, and become whole where they are needed."""

    def whole(self) -> Tensor:
        """Gather the parts: [batch, seq, vocab], perhaps cut on the vocabulary."""
        raise NotImplementedError


def vocabulary_shard(logits: Tensor) -> tuple[Tensor, VocabShard]:
    """Return this rank's shard of ``logits`` [..., vocab], and which shard it is; differentiable.

    Raises:
        ValueError: for a DTensor that is a partial sum, or that two axes cut on the vocabulary.
    """
    if isinstance(logits, Ungathered):
        logits = logits.whole()
    size = logits.shape[-1]
    if not isinstance(logits, DTensor):
        return logits, VocabShard(size)
    last = Shard(logits.ndim - 1)
    axes = [axis for axis, placement in enumerate(logits.placements) if placement == last]
    if len(axes) > 1 or any(placement.is_partial() for placement in logits.placements):
        raise ValueError(
            f"logits with the placements {logits.placements} are not shards of the vocabulary over one axis; "
            "redistribute them first: logits.redistribute(placements=[...])"
        )
    return to_local(logits), VocabShard.of(size, logits.device_mesh.get_group(axes[0]) if axes else None)


def token_losses(
    logits: Tensor,
    targets: Tensor,
    shard: VocabShard,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    passes: Passes | None = None,
) -> Tensor:
    """Compute the cross entropy of each token.

    Args:
        logits: [tokens, vocab / tp], any floating-point dtype.
        targets: [tokens], ids of the whole vocabulary.
        shard: which shard ``logits`` is.
        ignore_index: targets of this value have loss 0 and gradient 0.
        label_smoothing: share of the target that is spread evenly over the vocabulary.
        passes: over the logits, compiled; ``None``: kernel by kernel.

    Returns:
        [tokens], float32.

    Raises:
        ValueError: for targets outside of the vocabulary (on CUDA an assertion on the device), or a share that is none.
    """
    check_smoothing(label_smoothing)
    if is_transformed() and shard.group is None:
        return _transformed_losses(logits, targets, ignore_index, label_smoothing)
    check_targets(targets, shard.size, ignore_index)
    return _TokenLosses.apply(logits, targets, SmoothedLoss(shard, label_smoothing, passes), ignore_index)


def _transformed_losses(logits: Tensor, targets: Tensor, ignore_index: int | None, label_smoothing: float) -> Tensor:
    """Let torch compute token losses, whose transforms follow its own functions, batched ones too, and not ours."""
    options: Any = dict(ignore_index=-1 if ignore_index is None else ignore_index, label_smoothing=label_smoothing)
    return functional.cross_entropy(logits.to(wide(logits)), targets, reduction="none", **options)


def token_entropies(logits: Tensor, shard: VocabShard) -> Tensor:
    """Computes the entropy of each token's distribution, in nats: [tokens], from ``logits`` [tokens, vocab / tp]."""
    return _TokenEntropies.apply(logits, shard)


def largest(logits: Tensor, shard: VocabShard) -> Tensor:
    """Finds the id of the largest logit of each row, [tokens]; the smallest id among equals."""
    maximum = shard.maximum(logits)
    ids = torch.full_like(maximum, shard.size, dtype=torch.int64)
    if logits.shape[-1]:
        values, columns = logits.max(-1)
        ids = torch.where(values == maximum, columns + shard.start, ids)
    return shard.reduce(ids, dist.ReduceOp.MIN)


def check_targets(targets: Tensor, size: int, ignore_index: int | None) -> None:
    """Refuses targets that no rank holds. Without a host synchronization on CUDA."""
    valid = (targets >= 0) & (targets < size)
    if ignore_index is not None:
        valid |= targets == ignore_index
    if targets.device.type != "cpu":
        assert_async(valid.all(), f"a label is outside of the vocabulary of {size}")
    elif not valid.all():
        bad = targets[~valid][0].item()
        raise ValueError(
            f"the label {bad} is outside of the vocabulary of {size}; labels are token ids, or {ignore_index} for "
            "tokens that do not count"
        )


def check_smoothing(label_smoothing: float) -> None:
    """Refuse label smoothing outside of 0 to 1."""
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing={label_smoothing} is a share of the target; use a number from 0 to 1")


def ignored(targets: Tensor, ignore_index: int | None) -> Tensor:
    """Tells which of ``targets`` do not count."""
    return torch.zeros_like(targets, dtype=torch.bool) if ignore_index is None else targets == ignore_index


def wide(logits: Tensor) -> torch.dtype:
    """Chooses the dtype to compute in."""
    return torch.promote_types(logits.dtype, torch.float32)


def _blocks(logits: Tensor, passes: Passes | None = None) -> Iterable[slice]:
    elements = _ON_CPU if logits.device.type == "cpu" else _COMPILED if passes else _ON_DEVICES
    rows = max(1, elements // max(1, logits.shape[-1]))
    return rounds([slice(i, i + rows) for i in range(0, logits.shape[0], rows)])


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, loss: SmoothedLoss, ignore_index: int | None) -> Tensor:
        maximum, sums = loss.start(logits, targets)
        for rows in _blocks(logits, loss.passes_over(logits)):
            loss.add_up(logits[rows], maximum[rows], sums[:, rows])
        loss.shard.reduce(sums)
        # Not the log-partition alone, maximum + log(sum): beside large logits it would lose its last digits.
        ctx.save_for_backward(logits, targets, maximum, sums[0].clone())
        ctx.loss, ctx.ignore_index = loss, ignore_index
        return loss.losses(sums).masked_fill_(ignored(targets, ignore_index), 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits, targets, maximum, sums = ctx.saved_tensors
        grad = grad.masked_fill(ignored(targets, ctx.ignore_index), 0)
        if is_differentiated():
            return ctx.loss.gradient(logits, targets, maximum, grad), None, None, None
        result = torch.empty_like(logits)
        for rows in _blocks(logits, ctx.loss.passes_over(logits)):
            ctx.loss.write_gradient(logits[rows], targets[rows], maximum[rows], sums[rows], grad[rows], result[rows])
        return result, None, None, None


class _TokenEntropies(torch.autograd.Function):
    """``H = log(sum exp x) - sum p x``, and ``dH / dx = -p (log p + H)``."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, shard: VocabShard) -> Tensor:
        maximum = shard.maximum(logits)
        sums = maximum.new_zeros((2, logits.shape[0]))
        for rows in _blocks(logits):
            shifted = _finite(logits[rows] - maximum[rows, None])
            powers = shifted.exp()
            sums[0, rows] = powers.sum(-1)
            sums[1, rows] = powers.mul_(shifted).sum(-1)
        shard.reduce(sums)
        log_sum = sums[0].log()
        entropies = log_sum - sums[1] / sums[0]
        ctx.save_for_backward(logits, maximum, log_sum, entropies)
        return entropies

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        refuse_second_order("entropy over a vocabulary", "compute it from logits.full_tensor()")
        logits, maximum, log_sum, entropies = ctx.saved_tensors
        result = torch.empty_like(logits)
        for rows in _blocks(logits):
            log_p = _finite((logits[rows] - maximum[rows, None]).sub_(log_sum[rows, None]))
            result[rows] = log_p.exp().mul_(log_p.add_(entropies[rows, None])).mul_(-grad[rows, None])
        return result, None


def _finite(values: Tensor) -> Tensor:
    """Replaces -inf, whose probability is 0, since 0 x -inf would be NaN."""
    return values.clamp_(min=torch.finfo(values.dtype).min / 2)
