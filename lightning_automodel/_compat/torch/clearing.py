"""Lets ``zero_grad`` clear gradients that wait elsewhere than in ``parameter.grad``.

FSDP2 and Megatron-FSDP keep those of all micro-batches of a step but the last in places of their own, of which torch's
``zero_grad`` does not know: what a user throws away there, or a run leaves that ends within a step, would be added to
the next step.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, Protocol
from weakref import WeakSet

from torch import Tensor, nn
from torch.optim import Optimizer


class Holder(Protocol):
    """Has gradients that wait."""

    def clear(self, parameters: set[Tensor], set_to_none: bool) -> None:
        """Do with those of ``parameters``, and of no others, what ``zero_grad(set_to_none)`` does."""


_HOLDERS: "WeakSet[Any]" = WeakSet()


def clear_with_others(holder: Holder) -> None:
    """Tell ``holder`` from now on what is cleared."""
    _tell_of_clearing()
    _HOLDERS.add(holder)


def clear_no_more(holder: Holder) -> None:
    """Leave ``holder`` alone: it has nothing."""
    _HOLDERS.discard(holder)


@functools.cache
def _tell_of_clearing() -> None:
    of_optimizer, of_module = Optimizer.zero_grad, nn.Module.zero_grad

    @functools.wraps(of_optimizer)
    def clear_optimizer(self: Optimizer, set_to_none: bool = True) -> None:
        of_optimizer(self, set_to_none)
        _clear(lambda: (p for group in self.param_groups for p in group["params"]), set_to_none)

    @functools.wraps(of_module)
    def clear_module(self: nn.Module, set_to_none: bool = True) -> None:
        of_module(self, set_to_none)
        _clear(self.parameters, set_to_none)

    Optimizer.zero_grad = clear_optimizer  # type: ignore[method-assign]
    nn.Module.zero_grad = clear_module  # type: ignore[method-assign]


def _clear(parameters: Callable[[], Iterable[Tensor]], set_to_none: bool) -> None:
    if _HOLDERS:
        cleared = set(parameters())
        for holder in list(_HOLDERS):
            holder.clear(cleared, set_to_none)
