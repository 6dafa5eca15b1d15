"""Compiled passes over logits, whole or in chunks: what several kernels do through a float32 array is two readings.

::

    eager:     logits -> shifted (float32) -> exp -> sum        exp -> probabilities -> gradient (float32) -> logits
    compiled:  logits -> sum of exp                             logits -> gradient, over the logits
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Passes:
    """What ``torch.compile`` makes of the two; shared by all models that are compiled alike.

    Attributes:
        add_up: :func:`_add_up`.
        write_gradient: :func:`_write_gradient`.
    """

    add_up: Callable[..., tuple[Tensor, Tensor | None]]
    write_gradient: Callable[..., None]


@cache
def compiled_passes(backend: str, dynamic: bool | None) -> Passes:
    """Compile the passes; ``backend`` and ``dynamic`` as for blocks."""
    options: dict[str, Any] = dict(backend=backend, dynamic=dynamic)
    return Passes(torch.compile(_add_up, **options), torch.compile(_write_gradient, **options))


def _add_up(logits: Tensor, maximum: Tensor, smoothed: bool) -> tuple[Tensor, Tensor | None]:
    """Sum exponentials of ``logits - maximum`` over each row, and the differences themselves if the loss is
    ``smoothed``: [rows].
    """
    shifted = logits - maximum[:, None]
    return shifted.exp().sum(-1), shifted.sum(-1) if smoothed else None


def _write_gradient(
    logits: Tensor, maximum: Tensor, scale: Tensor, spread: Tensor | None, columns: Tensor, target: Tensor, out: Tensor
) -> None:
    """Write ``exp(logits - maximum) * scale - spread``, less ``target`` in each row's column, to ``out``.

    ``out`` may be ``logits``. All others are [rows].
    """
    values = (logits - maximum[:, None]).exp() * scale[:, None]
    if spread is not None:
        values = values - spread[:, None]
    is_target = torch.arange(logits.shape[-1], device=logits.device)[None] == columns[:, None]
    out.copy_(torch.where(is_target, values - target[:, None], values))
