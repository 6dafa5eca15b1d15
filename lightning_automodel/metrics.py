"""Metrics for language models that take logits cut on the vocabulary as well as whole ones.

They are torchmetrics, so a strategy's trainer reduces them over the data ranks, and ``self.log`` takes them.
"""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_automodel.loss.functional import IGNORE_INDEX, count_hits, cross_entropy, next_tokens
from lightning_automodel.parallel.experts.load import expert_loads

__all__ = ["MeanOverTargets", "Perplexity", "TokenAccuracy", "TokenCounter", "expert_loads"]


class MeanOverTargets(Metric):
    """A mean over all targets of all batches and data ranks, each with the same weight."""

    full_state_update = False
    total: Tensor
    targets: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("targets", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def add(self, total: Tensor, targets: Tensor) -> None:
        """Adds a sum over ``targets`` targets; both are scalars."""
        # Not in place: a state that was made under inference mode could then not be updated outside of it.
        self.total = self.total + total.double()
        self.targets = self.targets + targets

    def compute(self) -> Tensor:
        """Computes the value over all targets so far."""
        return (self.total / self.targets.clamp(min=1)).float()


class _FromLogits(MeanOverTargets):
    """A mean of what logits say about targets.

    Args:
        ignore_index: value of labels that do not count.
        shift: position ``t`` is judged against label ``t + 1``, as models do with the labels that they are called with;
            ``False``: against label ``t``.
    """

    def __init__(self, ignore_index: int = IGNORE_INDEX, shift: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.ignore_index = ignore_index
        self.shift = shift

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Adds a batch.

        Args:
            logits: [batch, seq, vocab], plain or cut on the vocabulary.
            labels: [batch, seq].

        Raises:
            TypeError: if there are no logits.
        """
        if logits is None:
            raise TypeError(
                f"{type(self).__name__} needs logits, and a model with chunked_loss or a loss_kernel returns none "
                "beside its loss; call it without labels for them, or use chunked_loss=None and loss_kernel='torch'"
            )
        targets = next_tokens(labels, self.ignore_index) if self.shift else labels
        self.add(self.sum_over_targets(logits.detach(), targets), (targets != self.ignore_index).sum())

    def sum_over_targets(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Sums what one batch adds, to a scalar."""
        raise NotImplementedError


class Perplexity(_FromLogits):
    """The exponential of the mean loss per target."""

    higher_is_better = False

    def sum_over_targets(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Sums what one batch adds, to a scalar."""
        return cross_entropy(logits, targets, ignore_index=self.ignore_index, reduction="sum")

    def compute(self) -> Tensor:
        """Computes the value over all targets so far."""
        return super().compute().exp()


class TokenAccuracy(_FromLogits):
    """Share of the targets that are the most probable token."""

    higher_is_better = True

    def sum_over_targets(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Sums what one batch adds, to a scalar."""
        return count_hits(logits, targets, self.ignore_index)


class TokenCounter(Metric):
    """Counts tokens, each data rank's once, whatever the tensor-parallel size.

    Args:
        ignore_index: value of tokens that do not count.
    """

    full_state_update = False
    count: Tensor

    def __init__(self, ignore_index: int = IGNORE_INDEX, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.ignore_index = ignore_index
        self.add_state("count", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, tokens: Tensor, mask: Tensor | None = None) -> None:
        """Adds a batch of ids or labels, [batch, seq]; where ``mask`` of that shape is 0, they do not count."""
        counts = tokens != self.ignore_index
        self.count = self.count + (counts if mask is None else counts & mask.bool()).sum()

    def compute(self) -> Tensor:
        """Computes the value over all targets so far."""
        return self.count
