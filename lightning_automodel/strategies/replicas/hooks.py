"""Runs the hooks that users put on parameters behind the reduction, where a replica has the gradients of all ranks.

::

    p.register_hook(h)    GPU 0: gradient 1 -- kept, 0 goes on --+             +-- h(2) is added to p.grad
                          GPU 1: gradient 3 -- kept, 0 goes on --+-- mean: 2 --+-- h(2)

    p.register_post_accumulate_grad_hook(h)    waits, and sees p.grad when it is that of all ranks
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_automodel._compat.torch.modules import (
    gradient_hooks_of,
    hooks_after_accumulation,
    parameters_of,
    wrap_gradient_hooks,
    wrap_hooks_after_accumulation,
)
from lightning_automodel._compat.torch.tensors import after_backward, is_accumulated_now
from lightning_automodel.parallel.guards.hooks_of_users import is_of_user
from lightning_automodel.strategies.replicas.gradients import average

_Act = Callable[[Callable[[Tensor], Any], Tensor], Any]


class _Waiting:
    """Stands in the place of a hook.

    Attributes:
        hook: the user's.
    """

    def __init__(self, hook: Any, act: _Act) -> None:
        self.hook, self._act = hook, act

    def __call__(self, tensor: Tensor) -> Any:
        return self._act(self.hook, tensor)


class HooksOfReplicas:
    """The hooks of the parameters of a module, found whenever a step or a backward pass begins.

    Args:
        module: whose parameters they are on.
        is_known: tells whether the strategy runs them behind the present backward pass.
    """

    def __init__(self, module: nn.Module, is_known: Callable[[], bool]) -> None:
        self._module, self._is_known = module, is_known
        self._kept: dict[nn.Parameter, list[Tensor]] = {}
        self._accumulated: set[nn.Parameter] = set()
        self._on_gradients: list[nn.Parameter] = []
        self._on_sums: list[nn.Parameter] = []

    @property
    def read_sums(self) -> bool:
        """Tell whether any hook sees what a step has accumulated so far."""
        return bool(self._on_sums)

    def find(self) -> None:
        """Let those that came since wait, too; note the parameters that have any."""
        parameters = parameters_of(self._module)
        for parameter in parameters:
            if any(map(is_of_user, gradient_hooks_of(parameter))):
                wrap_gradient_hooks(parameter, partial(_wait, act=partial(self._keep, parameter)))
            if any(map(is_of_user, hooks_after_accumulation(parameter))):
                wrap_hooks_after_accumulation(parameter, partial(_wait, act=self._note))
        self._on_gradients = [p for p in parameters if _waiting(gradient_hooks_of(p))]
        self._on_sums = [p for p in parameters if _waiting(hooks_after_accumulation(p))][::-1]

    def forget(self) -> None:
        """Drop what a backward pass has left that an exception ended."""
        self._kept.clear()

    def remove(self) -> None:
        """Put the users' hooks back in their places."""
        for parameter in self._module.parameters():
            wrap_gradient_hooks(parameter, _unwrap)
            wrap_hooks_after_accumulation(parameter, _unwrap)

    @torch.no_grad()
    def run_on_gradients(self) -> None:
        """Run those of ``register_hook`` on what the last backward pass gave. Collective if there are any."""
        hooked = self._on_gradients
        for parameter, count in zip(hooked, _most([len(self._kept.get(p, ())) for p in hooked], hooked), strict=True):
            for gradient in _filled(self._kept.pop(parameter, []), count, parameter):
                value = average(gradient)
                for waiting in _waiting(gradient_hooks_of(parameter)):
                    changed = waiting.hook(value)
                    value = value if changed is None else changed
                parameter.grad = value if parameter.grad is None else parameter.grad.add_(value)

    @torch.no_grad()
    def run_on_sums(self) -> None:
        """Run those of ``register_post_accumulate_grad_hook``, behind the reduction. Collective if there are any."""
        hooked = self._on_sums
        for parameter, is_due in zip(hooked, _most([p in self._accumulated for p in hooked], hooked), strict=True):
            for waiting in _waiting(hooks_after_accumulation(parameter)) if is_due else ():
                waiting.hook(parameter)
        self._accumulated.clear()

    def _keep(self, parameter: nn.Parameter, hook: Callable[[Tensor], Any], gradient: Tensor) -> Tensor | None:
        if not is_accumulated_now(parameter):
            return hook(gradient)  # of torch.autograd.grad, which gives a rank its own
        if _waiting(gradient_hooks_of(parameter))[0].hook is not hook:
            return None
        if not (self._kept or self._is_known()):
            after_backward(self.run_on_gradients)
        self._kept.setdefault(parameter, []).append(gradient.detach())
        return torch.zeros_like(gradient)

    def _note(self, _: Callable[[Tensor], Any], parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        self._accumulated.add(parameter)


def _wait(hook: Any, act: _Act) -> Any:
    return _Waiting(hook, act) if is_of_user(hook) else hook


def _unwrap(hook: Any) -> Any:
    return hook.hook if isinstance(hook, _Waiting) else hook


def _waiting(hooks: list[Any]) -> list[_Waiting]:
    return [hook for hook in hooks if isinstance(hook, _Waiting)]


def _most(counts: list[int], parameters: list[nn.Parameter]) -> list[int]:
    """Return the largest number of all ranks, for each parameter. Collective unless there are none."""
    if not counts:
        return []
    found = torch.tensor(counts, dtype=torch.int32, device=parameters[0].device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.tolist()


def _filled(gradients: list[Tensor], count: int, parameter: nn.Parameter) -> list[Tensor]:
    """Add zeros where other ranks have a gradient more."""
    return gradients + [torch.zeros_like(parameter) for _ in range(count - len(gradients))]
