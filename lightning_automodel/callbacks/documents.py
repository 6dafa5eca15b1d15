"""Finds the real tokens of a batch, and the documents that they belong to, without looking at values on the host.

::

    attention_mask  1 1 1 1 1 0 0 0     one document of 5 tokens; padding is no token
    position_ids    0 1 2 0 1 0 1 2     packed: documents of 3, 2 and 3 tokens
    labels          5 2 7 4 9 x x x     x: ignored; the last one holds no target, it is the padding of a packed row
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_automodel.loss.functional import IGNORE_INDEX
from lightning_automodel.planner.flops import Window


def documents_of(batch: Any) -> Tensor | None:
    """Measure the documents of a batch as models of transformers are called with.

    Returns:
        their lengths in tokens, int64 [rows, seq], in any places, 0 elsewhere; ``None`` for any other batch.
    """
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        return None
    mask, positions, labels = (_like(batch.get(name), ids) for name in ("attention_mask", "position_ids", "labels"))
    begins = torch.zeros_like(ids) if positions is None else (positions == 0).long()
    begins[:, 0] = 1
    document = begins.cumsum(1) - 1  # [rows, seq]
    real = torch.ones_like(ids) if mask is None else (mask != 0).long()
    lengths = torch.zeros_like(ids).scatter_add_(1, document, real)
    if labels is None or mask is not None:
        return lengths
    targets = torch.zeros_like(ids).scatter_add_(1, document, (labels != IGNORE_INDEX).long())
    return lengths * (targets > 0)


def _like(value: Any, ids: Tensor) -> Tensor | None:
    return value if isinstance(value, Tensor) and value.shape == ids.shape else None


def count_documents(lengths: Tensor, windows: Sequence[Window]) -> Tensor:
    """Count tokens, and the pairs of tokens that attention sees through each window: int64 [1 + windows]."""
    pairs = [lengths * (lengths if window is None else lengths.clamp(max=window)) for window in windows]
    return torch.stack([count.sum() for count in (lengths, *pairs)])


def rows_of(batch: Any) -> int:
    """Count the samples of a batch: the size of the first dim of its first tensor; 0 if there is none."""
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else [batch]
    return next((len(value) for value in values if isinstance(value, Tensor) and value.ndim), 0)
