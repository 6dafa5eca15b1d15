"""Gradients of a window: the micro-batches of one step, which Megatron-FSDP sums in buffers of its own.

What torch's ``zero_grad`` clears, leaves or has filled is told to the buffers, and read from them::

    begin     clears what was cleared; keeps what the optimizer had left, where buffers hold sums of this rank alone
    end       adds what was left; takes away what no backward pass reached; looks whether all are finite
"""

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_automodel._compat.torch.clearing import clear_with_others
from lightning_automodel.config import MegatronFSDPConfig
from lightning_automodel.distributed.logs import warn_once
from lightning_automodel.gradients import to_local_if_dtensor
from lightning_automodel.parallel.megatron_fsdp.norms import Norms
from lightning_automodel.parallel.megatron_fsdp.order import Calls


class WindowGradients:
    """Follows what is cleared, left and reached in windows.

    Args:
        wrapper: the library's.
        parameters: those that the optimizer has, by name.
        config: the switches.
        norms: of ``parameters``.
        calls: of the modules that are gathered within passes.
    """

    def __init__(
        self,
        wrapper: Any,
        parameters: Mapping[str, nn.Parameter],
        config: MegatronFSDPConfig,
        norms: Norms,
        calls: Calls,
    ) -> None:
        self._wrapper, self._parameters, self._config = wrapper, parameters, config
        self._norms, self._calls = norms, calls
        self._is_closed, self._is_abandoned = True, False
        self._cleared: set[str] = set()  # within a window
        self._left: dict[str, Tensor] = {}
        self._reached: set[str] = set()
        for name, raw in wrapper.raw_param.items():
            if raw.requires_grad:
                raw.register_post_accumulate_grad_hook(partial(self._note, name))
        clear_with_others(self)

    def begin_backward(self) -> None:
        """Clears what was cleared since the last backward pass.

        Raises:
            ValueError: if what a pass has left that an exception ended was not cleared.
        """
        cleared = self._cleared
        if self._is_closed:
            self._follow_zero_grad()
        elif cleared:
            self._clear(cleared)
        if self._is_abandoned and {n for n, p in self._parameters.items() if p.requires_grad} - cleared:
            raise ValueError(
                "a backward pass was ended by an exception, and gradients of a part of its layers are left; call "
                "self.zero_grad() before the next one"
            )
        self._cleared = set()
        self._is_abandoned = self._is_closed = False

    def end(self) -> None:
        """Closes the window, whose gradients are reduced. Collective.

        Raises:
            ValueError: for gradients that are not finite, and ranks that called modules in unlike orders.
        """
        self._is_closed = True
        self._give_empty()
        self._add_left()
        self._check()

    def abandon(self) -> None:
        """Ask for ``zero_grad`` before the next backward pass: an exception has ended one."""
        self._is_abandoned = True

    def clear(self, parameters: set[Tensor], set_to_none: bool) -> None:
        """Note that ``zero_grad`` clears ``parameters`` within a window; else clear those that the optimizer has in the
        place of those that compute, which a module may have now.
        """
        raw = self._wrapper.raw_param
        names = {name for name, p in self._parameters.items() if p in parameters or raw[name] in parameters}
        if self._is_closed:
            for parameter in (self._parameters[name] for name in names):
                if parameter.grad is not None:
                    parameter.grad = None if set_to_none else parameter.grad.zero_()
            return
        self._cleared |= names
        if set_to_none:
            self._reached -= names

    # ---- between windows ---------------------------------------------------------------------------------------------

    def _follow_zero_grad(self) -> None:
        """Clear the library's buffers of gradients, which ``zero_grad`` of an optimizer does not know."""
        left = {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        self._reached = set(left)  # zeros are a gradient, too
        if not any(bool(to_local_if_dtensor(gradient).any()) for gradient in left.values()):
            self._wrapper.zero_grad_buffer()
            return
        if self._config.zero_dp_strategy < 2:  # its buffers hold sums of this rank until the window ends
            self._left = {name: to_local_if_dtensor(gradient).clone() for name, gradient in left.items()}
            self._wrapper.zero_grad_buffer()
            return
        self._clear(name for name in self._parameters if name not in left)
        for name, gradient in left.items():
            own = self._sum_of(name)
            if own is not None:  # in whose place a user may have put another
                own.copy_(to_local_if_dtensor(gradient).reshape(own.shape))

    def _clear(self, names: Iterable[str]) -> None:
        for name in names:
            self._left.pop(name, None)
            own = self._sum_of(name)
            if own is not None:
                own.zero_()

    def _sum_of(self, name: str) -> Tensor | None:
        """Return what the library's buffer has of a gradient, as much as this rank has of it."""
        buffers = self._wrapper.param_and_grad_buffer
        raw = self._wrapper.raw_param[name]
        group = buffers.parameter_groups[buffers.param_to_param_group[raw]]
        if group.main_grad_buffer is None:
            return None
        return group.main_grad_buffer.get_item(group.main_grad_buffer.param_idx[raw])

    # ---- at the end of a window --------------------------------------------------------------------------------------

    def _note(self, name: str, _: Tensor) -> None:
        """Note that a backward pass reached a parameter: a hook of the one that computes."""
        self._reached.add(name)

    def _give_empty(self) -> None:
        """Give a rank whose shard is empty an empty gradient, or it would stay out of what others compute."""
        for parameter in self._parameters.values():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _add_left(self) -> None:
        """Add gradients that the optimizer had when the window began."""
        for name, gradient in self._left.items():
            summed = self._parameters[name].grad
            assert summed is not None
            to_local_if_dtensor(summed).add_(gradient)
        self._left = {}

    def _check(self) -> None:
        """Look whether gradients are finite, and take those away that no backward pass reached since they were cleared:
        they are zero, with which an optimizer still decays and moves a parameter.
        """
        trained = [name for name, p in self._parameters.items() if p.requires_grad]
        unused = [name for name in trained if name not in self._reached]
        if not self._config.check_for_nan_in_grad:
            _warn_of_unused(unused)
            return
        power = self._norms.power(self._parameters.values(), 2.0)
        sums = torch.stack([power, torch.full_like(power, len(unused))]).double()
        sums = torch.cat([sums, self._calls.terms().to(power.device)])
        dist.all_reduce(sums)
        total, missing, *calls = sums.tolist()  # the only wait of the host
        self._calls.check(*calls)
        if not math.isfinite(total):
            raise ValueError(
                "a gradient is NaN or infinite; look for the first loss that is, or set "
                "MegatronFSDPConfig(check_for_nan_in_grad=False) to go on all the same"
            )
        if missing:
            everywhere = torch.tensor([float(name in unused) for name in trained], device=power.device)
            dist.all_reduce(everywhere, dist.ReduceOp.MIN)
            for name, is_unused in zip(trained, everywhere.tolist(), strict=True):
                if is_unused:
                    self._parameters[name].grad = None


def _warn_of_unused(names: list[str]) -> None:
    if names:
        warn_once(
            f"no backward pass reached {names[0].partition('.')[2]}, and Megatron-FSDP gives it a gradient of "
            "zeros, with which weight decay and momentum still change it; freeze what is never used, or leave "
            "MegatronFSDPConfig(check_for_nan_in_grad=True), which looks at this too"
        )
