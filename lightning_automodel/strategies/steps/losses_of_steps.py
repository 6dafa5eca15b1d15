"""Gives optimizers whose steps follow the loss that of all data ranks: searches along a line, steps of its size.

::

    GPU             0     1
    closure       4.1   4.3     the losses of their samples, with one gradient
    LBFGS reads   4.2   4.2     else each would search on its own, and call its closure more or less often
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_automodel.strategies.steps.optimizers import reads_loss


class LossesOfSteps:
    """Averages what closures return, but for optimizers that do not read it.

    Args:
        optimizers: those that are tried; one that comes later is taken to read it.
        data_size: how many ranks see different samples.
    """

    def __init__(self, optimizers: Iterable[Optimizer] = (), data_size: int = 1) -> None:
        self._is_one = data_size == 1
        self._unread = set() if self._is_one else {optimizer for optimizer in optimizers if not reads_loss(optimizer)}

    def averaged(
        self, optimizer: Optimizer, closure: Callable[[], Any], reduce: Callable[[Tensor], Tensor], device: torch.device
    ) -> Callable[[], Any]:
        """Wrap ``closure`` so that it returns the mean of ``reduce``, a tensor or a number as before; not ``None``."""
        if self._is_one or optimizer in self._unread:
            return closure

        def run() -> Any:
            loss = closure()
            if isinstance(loss, Tensor):
                return reduce(loss)
            if isinstance(loss, float):
                return float(reduce(torch.tensor(loss, dtype=torch.float64, device=device)))
            return loss

        return run
