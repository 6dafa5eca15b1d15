"""How logits that do not exist would be computed: hidden states, a linear head, and what the model did behind it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Self

import torch
from torch import Tensor

from lightning_automodel.loss.chunked import ChunkOptions, chunked_loss_sum
from lightning_automodel.loss.cut_logits import CutLogits
from lightning_automodel.loss.kernels import fused_loss_sum
from lightning_automodel.loss.passes import Passes
from lightning_automodel.loss.vocab_parallel import VocabShard

Operation = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class LinearRecipe(CutLogits):
    """Hidden states in the place of the vocabulary, and what makes logits of them.

    Attributes:
        weight: [vocab / tp, hidden].
        bias: [vocab / tp].
        shard: which shard of the vocabulary these are.
        dtype: of the logits.
        chunk_size: tokens whose logits exist at a time.
        kernel: what computes the loss: "torch", or the name of a library.
        passes: of "torch" over a chunk's logits, compiled.
        owner: name of the model's class, for messages.
        operations: what the model did with the logits, in order, on [chunk, vocab / tp].
    """

    weight: Tensor
    bias: Tensor | None
    shard: VocabShard
    dtype: torch.dtype
    chunk_size: int
    kernel: str
    passes: Passes | None = None
    owner: str
    operations: tuple[Operation, ...] = ()

    def followed_by(self, operation: Operation, **changes: Any) -> Self:
        """Add an ``operation``, and what it ``changes``: ``size``, ``dtype``."""
        return replace(self, operations=(*self.operations, operation), **changes)

    def detached(self) -> Self:
        """Take the same logits as constants, as torch does with what is computed without gradients."""
        bias = None if self.bias is None else self.bias.detach()
        return replace(self, local=self.local.detach(), weight=self.weight.detach(), bias=bias)

    def loss_sum(self, targets: Tensor, ignore_index: int, label_smoothing: float) -> Tensor:
        """Sums the losses of ``targets``, one for each position in order, chunk by chunk: a scalar in float32."""
        hidden, targets = self.last().reshape(-1, self.local.shape[self.dim]), targets.reshape(-1)
        if self.kernel != "torch":
            self._refuse_operations()
            return fused_loss_sum(self.kernel, hidden, self.weight, self.bias, targets, ignore_index, label_smoothing)
        options = ChunkOptions(
            chunk_size=self.chunk_size,
            shard=self.shard.limited(self.size),
            transform=self._apply_operations if self.operations else None,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            gradients=torch.is_grad_enabled(),
            passes=self.passes,
        )
        return chunked_loss_sum(hidden, self.weight, self.bias, targets, options)

    def _apply_operations(self, logits: Tensor) -> Tensor:
        return reduce(lambda x, operation: operation(x), self.operations, logits)

    def _refuse_operations(self) -> None:
        if self.operations:
            raise ValueError(
                f"{self.owner} changes its logits between head and loss (soft-capping, scaling), which "
                f"loss_kernel={self.kernel!r} does not do; use loss_kernel='torch' with chunked_loss=1024"
            )
