"""Parameters that are reached more than once in a backward pass: layers that a model shares, recomputed reentrantly.

Each recomputed call has a backward pass of its own within the outer one, and Megatron-FSDP would take the gradient of
the last for that of all::

    forward pass     block(x), block(x)        two calls without gradients: those of the block wait for the end
    backward pass    ... block ... block ...   added up by autograd, handed over once
"""

from collections import Counter
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from lightning_automodel._compat.megatron_fsdp import hand_over_at_the_end, is_handed_over_at_the_end


class ReachedAgain:
    """Finds such parameters.

    Args:
        trained: those that compute, by name.
        check: called when one is reached.
    """

    def __init__(self, trained: Iterable[tuple[str, Tensor]], check: Callable[[], None]) -> None:
        self._check = check
        self._names = dict((parameter, name) for name, parameter in trained)
        self._calls: Counter[nn.Module] = Counter()
        self._reached: set[Tensor] = set()
        self._is_trained = False
        for parameter in self._names:
            parameter.register_post_accumulate_grad_hook(self._note)

    def begin_forward(self) -> None:
        """Begin the outermost forward pass."""
        self._is_trained = torch.is_grad_enabled()

    def call(self, part: nn.Module, parameters: Iterable[Tensor]) -> None:
        """Note a call of ``part`` within a forward pass, and of a second one without gradients hand over at the end."""
        if not self._is_trained or torch.is_grad_enabled():
            return
        self._calls[part] += 1
        if self._calls[part] == 2:
            hand_over_at_the_end(parameters)

    def begin_backward(self) -> None:
        """Begin a backward pass."""
        self._calls.clear()
        self._reached.clear()

    def _note(self, parameter: Tensor) -> None:
        self._check()
        if parameter in self._reached and not is_handed_over_at_the_end(parameter):
            raise ValueError(
                f"a backward pass reached {self._names[parameter]} twice, of which Megatron-FSDP would keep one "
                "gradient: a layer that is called again within what is recomputed; use checkpoint(..., "
                'use_reentrant=False), or gradient_checkpointing_kwargs={"use_reentrant": False}'
            )
        self._reached.add(parameter)
