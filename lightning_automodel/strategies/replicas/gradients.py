"""Averages gradients over replicas where torch's wrapper would not, or not in float32."""

from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_automodel._compat.torch.tensors import after_backward


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
            parameter.grad = average(gradient)


def average(gradient: Tensor) -> Tensor:
    """Return the mean over all ranks, taken in float32 at least. Collective."""
    wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32)).div(dist.get_world_size())
    dist.all_reduce(wide)
    return wide.to(gradient.dtype)


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
    """Averages gradients behind backward passes that torch's wrapper is not prepared for, and would leave on their
    rank, without a word: ``loss.backward()`` in steps by hand, a second pass of ``backward``, one of a hook behind it.

    Args:
        module: also its parameters that do not train yet.
        is_held: tells whether gradients stay on their rank for now.
        then: runs behind each average.
    """

    def __init__(self, module: nn.Module, is_held: Callable[[], bool], then: Callable[[], None]) -> None:
        self._parameters = [p for p in module.parameters() if p.is_floating_point() or p.is_complex()]
        self._is_held, self._then = is_held, then
        self.is_known = self._is_waiting = False
        self._handles = [_hook(parameter, self._note) for parameter in self._parameters]

    def expect(self, loss: Tensor) -> None:
        """Know the backward pass from ``loss`` by its beginning: one behind it is another one."""
        if loss.grad_fn is not None:
            loss.register_hook(lambda _: after_backward(self._forget))

    @contextmanager
    def known(self) -> Generator[None, None, None]:
        """Leave the first backward pass within this context to the strategy."""
        self.is_known = True
        try:
            yield
        finally:
            self.is_known = False

    def forget(self) -> None:
        """Wait for no backward pass that an exception may have ended."""
        self._is_waiting = False

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()

    def _forget(self) -> None:
        self.is_known = False

    def _note(self, _: Tensor) -> None:
        if not (self.is_known or self._is_waiting or self._is_held()):
            self._is_waiting = True
            after_backward(self._average)

    def _average(self) -> None:
        self._is_waiting = False
        average_gradients([parameter for parameter in self._parameters if parameter.requires_grad])
        self._then()


def _hook(parameter: nn.Parameter, note: Callable[[Tensor], None]) -> torch.utils.hooks.RemovableHandle:
    """Call ``note`` when a gradient was added to ``parameter``, also if it trains later only, as torch would refuse."""
    trains = parameter.requires_grad
    handle = parameter.requires_grad_().register_post_accumulate_grad_hook(note)
    parameter.requires_grad_(trains)
    return handle
