"""Swaps the parameters of a module for other tensors while it runs, also where it is recomputed.

::

    pre-hook   p._parameters["weight"] = compute(weight)      a slice, a narrow copy
               the module's own forward sees compute(weight); names and stored parameters stay
    hook       p._parameters["weight"] = weight               also if the forward pass raised
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from lightning_automodel._compat.modules import own_buffers, own_parameters
from lightning_automodel.modules.forward import Context, keep_for_recomputation

Compute = Callable[[Any], Tensor]
"""A stored parameter to the tensor that the forward pass sees, with autograd."""

_Swapped = list[tuple[nn.Module, str, Tensor]]


class ParameterSwap:
    """Exchange parameters of one module, and of modules inside of it, during its forward pass.

    A parameter that hangs in several places is computed once. A copy of the module copies this object along, so each
    copy exchanges its own parameters.

    Args:
        stored: the class of the tensors that are exchanged; what is of another class was exchanged by an outer call.
    """

    def __init__(self, stored: type[Tensor] = nn.Parameter) -> None:
        self._stored = stored
        self._entries: list[tuple[nn.Module, str, Compute]] = []
        self._running: list[_Swapped] = []

    def add(self, owner: nn.Module, name: str, compute: Compute) -> None:
        """Exchange the parameter ``name`` of ``owner`` for what ``compute`` gives for it."""
        self._entries.append((owner, name, compute))

    def install(self, module: nn.Module) -> None:
        """Exchange in every forward pass of ``module``, and in every recomputation of it."""
        module.register_forward_pre_hook(self._enter)
        module.register_forward_hook(self._leave, always_call=True)
        keep_for_recomputation(module, self._again)

    def _enter(self, module: nn.Module, args: tuple) -> None:
        self._running.append(self._swap_in())

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        if self._running:  # nothing, if a hook before raised
            _swap_out(self._running.pop())

    def _again(self, module: nn.Module) -> Context:
        return self._swapped

    @contextmanager
    def _swapped(self) -> Generator[None, None, None]:
        swapped = self._swap_in()
        try:
            yield
        finally:
            _swap_out(swapped)

    def _swap_in(self) -> _Swapped:
        computed: dict[Tensor, Tensor] = {}
        swapped: _Swapped = []
        for owner, name, compute in self._entries:
            parameter = own_parameters(owner)[name]
            if not isinstance(parameter, self._stored):
                continue
            if parameter not in computed:
                computed[parameter] = compute(parameter)
            own_parameters(owner)[name] = computed[parameter]  # type: ignore[assignment]
            swapped.append((owner, name, parameter))
        return swapped


def _swap_out(swapped: _Swapped) -> None:
    for owner, name, parameter in swapped:
        # peft's adapters of a parameter take it out for a pass, and put back as a buffer what is no ``nn.Parameter``.
        own_buffers(owner).pop(name, None)
        own_parameters(owner)[name] = parameter  # type: ignore[assignment]
