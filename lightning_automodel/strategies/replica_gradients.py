"""Averages gradients over replicas where torch's wrapper would not, or not in float32."""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_automodel._compat.tensors import after_backward


def average_gradients(parameters: list[nn.Parameter]) -> None:
    """Average the gradients with which ``parameters`` wait for an optimizer step, if they have any. Collective.

    torch's wrapper would do so in the last micro-batch of the step, for which it does not know them. What was averaged
    before stays what it is.
    """
    if not parameters:
        return
    found = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=parameters[0].device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    for parameter, is_waiting in zip(parameters, found.tolist(), strict=True):
        if is_waiting:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32)).div(dist.get_world_size())
            dist.all_reduce(wide)
            parameter.grad = wide.to(gradient.dtype)


def reduce_in_float32(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages narrow gradients in float32, as FSDP2 does: a communication hook.

    Args:
        bucket: gradients of one dtype.
    """
    narrow = bucket.buffer()
    wide = narrow.to(torch.promote_types(narrow.dtype, torch.float32)).div_(dist.get_world_size())
    future = dist.all_reduce(wide, async_op=True).get_future()
    return future.then(lambda done: narrow.copy_(done.value()[0]))


class PlainBackward:
    """Averages gradients behind a backward pass that a step by hand calls as ``loss.backward()``.

    torch's wrapper is prepared for those of ``self.manual_backward``, and would leave the gradients of all others on
    their rank, without a word.

    Args:
        parameters: of the module, also those that do not train yet.
        is_held: tells whether gradients stay on their rank for now.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], is_held: Callable[[], bool]) -> None:
        self._parameters = [p for p in parameters if p.is_floating_point() or p.is_complex()]
        self._is_held = is_held
        self._is_known = self._is_waiting = False
        self._handles = [_hook(parameter, self._note) for parameter in self._parameters]

    @contextmanager
    def known(self) -> Generator[None, None, None]:
        """Leave the backward pass within this context to the strategy."""
        self._is_known = True
        try:
            yield
        finally:
            self._is_known = False

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()

    def _note(self, _: Tensor) -> None:
        if not (self._is_known or self._is_waiting or self._is_held()):
            self._is_waiting = True
            after_backward(self._average)

    def _average(self) -> None:
        self._is_waiting = False
        average_gradients([parameter for parameter in self._parameters if parameter.requires_grad])


def _hook(parameter: nn.Parameter, note: Callable[[Tensor], None]) -> torch.utils.hooks.RemovableHandle:
    """Call ``note`` when a gradient was added to ``parameter``, also if it trains later only, as torch would refuse."""
    trains = parameter.requires_grad
    handle = parameter.requires_grad_().register_post_accumulate_grad_hook(note)
    parameter.requires_grad_(trains)
    return handle
