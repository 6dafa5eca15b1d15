"""Losses weighed by tokens: over an optimizer step while training, over a whole data set while evaluating."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_automodel.finetuning.rows import IGNORED
from lightning_automodel.metrics import MeanOverTargets


def count_causal_targets(labels: Tensor) -> Tensor:
    """Counts the tokens of a causal model's loss: an int64 scalar on the device of ``labels`` [batch, seq].

    The first position is nobody's target, because the model shifts labels by one.
    """
    return (labels[:, 1:] != IGNORED).sum()


class TokenWindow:
    """Target count and loss sum of the micro-batches of one optimizer step, on the device, without synchronization.

    Every micro-batch's loss is its sum over tokens divided by one ``capacity``. What the gradient lacks to the mean
    over all tokens of the step is one factor, known when the last micro-batch is through::

        the loop makes     1 / (micro-batches * ranks) * sum over micro-batches and ranks of (loss sum / capacity)
        the mean is        1 / tokens                  * sum over micro-batches and ranks of  loss sum
        so the factor is   micro-batches * ranks * capacity / tokens
    """

    def __init__(self) -> None:
        self.capacity: float | None = None
        self._sums: Tensor | None = None

    def agree_on_capacity(self, labels: Tensor, group: dist.ProcessGroup | None) -> float:
        """Agrees on the divisor of every loss of this run: tokens of the largest first micro-batch of any data rank.

        Any constant that all ranks share would do; this one keeps losses, and so half-precision gradients, near 1.
        """
        if self.capacity is None:
            largest = torch.tensor(labels.numel(), device=labels.device)
            if group is not None:
                dist.all_reduce(largest, dist.ReduceOp.MAX, group)
            self.capacity = int(largest)
        return self.capacity

    def add(self, targets: Tensor, loss_sum: Tensor) -> None:
        """Counts one micro-batch; both are scalars."""
        sums = torch.stack([targets.double(), loss_sum.detach().double()])
        self._sums = sums if self._sums is None else self._sums + sums

    def close(self, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
        """Sums target count and loss over ``group`` in one all-reduce (float64 scalars), and starts a new window."""
        assert self._sums is not None, "an optimizer step without a training step"
        sums, self._sums = self._sums, None
        if group is not None:
            dist.all_reduce(sums, group=group)
        return sums[0], sums[1]

    def reset(self) -> None:
        """Forgets an unfinished window."""
        self._sums = None

    def divisor(self, group: dist.ProcessGroup | None, micro_batches: int) -> float:
        """Returns what a step's loss sums are divided by in the loop: micro-batches * ranks * capacity."""
        assert self.capacity is not None, "no training step has agreed on a capacity"
        return micro_batches * _size(group) * self.capacity

    def state(self, group: dist.ProcessGroup | None, micro_batches: int) -> dict[str, Any]:
        """Sums the window so far over ``group``. Collective. Empty between windows."""
        if self._sums is None:
            return {}
        sums = self._sums.clone()
        if group is not None:
            dist.all_reduce(sums, group=group)
        return {"divisor": self.divisor(group, micro_batches), "sums": sums.tolist()}

    def restore(
        self, state: Mapping[str, Any], group: dist.ProcessGroup | None, micro_batches: int, device: torch.device
    ) -> None:
        """Goes on where :meth:`state` was taken, on any number of ranks: the first of ``group`` holds all sums.

        The gradients so far have that run's divisor, and so get those that are added to them.
        """
        self.reset()
        if state:
            self.capacity = state["divisor"] / (micro_batches * _size(group))
            is_first = group is None or group.rank() == 0
            values = state["sums"] if is_first else [0.0, 0.0]
            self._sums = torch.tensor(values, dtype=torch.float64, device=device)


def _size(group: dist.ProcessGroup | None) -> int:
    return dist.get_world_size(group) if group is not None else 1


class TokenLoss(MeanOverTargets):
    """Mean loss per target token, exact over uneven batches and ranks."""

    higher_is_better = False

    def update(self, loss_sum: Tensor, targets: Tensor) -> None:
        """Adds the loss summed over a batch and its number of targets, both scalars."""
        self.add(loss_sum, targets)


class TokenPerplexity(TokenLoss):
    """The exponential of the mean loss per target token, from the losses that a model returns and not from logits."""

    def compute(self) -> Tensor:
        """Computes the perplexity, float32."""
        return super().compute().exp()
