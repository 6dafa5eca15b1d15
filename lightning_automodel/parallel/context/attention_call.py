"""Describes one call of an attention function, which the exchanges make in parts."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_automodel.distributed.sequence_rows import Bounds, Rows
from lightning_automodel.modules.forward import Context


@dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """One call of an attention function.

    Attributes:
        rows: of the queries.
        function: ``(module, query, key, value, mask, *args, **kwargs)`` to [batch, queries, heads, dim] and something.
        module: that calls it.
        mask: [batch, heads or 1, rows or 1, seq], of all rows for all-to-all; ``None``: see ``causal``.
        bounds: by chunk, first and last key that any of its rows sees; ``None``: not known.
        causal: without a mask, each query sees the keys up to its own.
        args: further arguments.
        kwargs: further arguments by name.
        again: where the backward pass computes attention once more, with keys that it gathers; ``None``: it does not.
    """

    rows: Rows
    function: Callable[..., tuple[Tensor, Tensor | None]]
    module: nn.Module
    mask: Tensor | None
    bounds: list[Bounds] | None
    causal: bool
    args: tuple
    kwargs: dict[str, Any]
    again: Context | None

    def keeping_little(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """Call ``function(*tensors)``; the backward pass calls it again, where no recomputation does anyway.

        A function of attention keeps what its mask adds to scores, layer by layer, and an eager one the scores.
        """
        again = self.again
        if again is None or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return function(*tensors)
        # The function may read parameters of its module (sinks): they must be those of the forward pass.
        options: dict[str, Any] = {
            "preserve_rng_state": self.dropout > 0,
            "context_fn": lambda: (nullcontext(), again()),
        }
        return checkpoint(function, *tensors, use_reentrant=False, **options)

    @property
    def dropout(self) -> float:
        """Return the share of the scores that is dropped."""
        return self.kwargs.get("dropout") or 0.0
