"""Finds where forward and backward passes of sharded modules begin and end, and says so to Megatron-FSDP.

Which parameters the modules have in place, so that user code in between reads and writes those that last::

    forward pass       that compute: gathered, and freed behind each block at stage 3
    behind it          the optimizer's, at stage 3 or if no backward pass follows; else still those that compute
    backward pass      that compute
    elsewhere          the optimizer's; what is written into them computes from the next forward pass on
"""

from collections.abc import Generator, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from lightning_automodel._compat.megatron_fsdp import check_gathers_of_backward
from lightning_automodel._compat.torch.modules import own_parameters
from lightning_automodel._compat.torch.tensors import (
    after_backward,
    is_accumulated_now,
    is_in_backward,
    let_last_hook_run_first,
)
from lightning_automodel.distributed.logs import warn_once
from lightning_automodel.distributed.second_order import refuse_second_order
from lightning_automodel.parallel.guards.written_copies import WrittenCopies
from lightning_automodel.parallel.guards.written_weights import refuse_written_weights
from lightning_automodel.parallel.hidden_outputs import differentiable
from lightning_automodel.parallel.megatron_fsdp.reentrant import ReachedAgain
from lightning_automodel.parallel.megatron_fsdp.sharded import ShardedModules

_IN_A_UNIT = (
    "which Megatron-FSDP gathers as one. Call that, with a forward that takes both ways; or name the classes of its "
    "parts in megatron_fsdp_unit_modules; or use zero_dp_strategy=2, which keeps parameters whole"
)
_ITSELF = (
    "a loss reads a parameter itself, outside of the forward pass of its model, and Megatron-FSDP would lose its "
    "gradient; let the model's own forward pass compute such a penalty (by a subclass of its class), use weight_decay "
    "of the optimizer, or add its gradient to parameter.grad in on_before_optimizer_step"
)
_OF_OTHERS = (
    "a backward pass has left gradients for an optimizer that has taken no step behind it, while another one has: a "
    "checkpoint of MegatronFSDPStrategy lacks them. If they are zeroed before that optimizer's next backward pass, "
    "as where two take turns, a run that goes on is exact; else save behind its steps, or use FSDP2TPStrategy"
)


class Passes:
    """Watches the passes of modules that are sharded together.

    Args:
        sharded: what is told.
        modules: those modules; any part of them that is not inside of a block may be called by itself.

    Attributes:
        is_accumulating: backward passes are of micro-batches that are not the last of their step.
        is_read: forward passes are called to be read (in a hook, for a metric): no backward pass follows.
        is_used: an optimizer has taken a step behind the last backward pass.
    """

    def __init__(self, sharded: ShardedModules, modules: Sequence[nn.Module]) -> None:
        self.sharded = sharded
        self.is_accumulating = self.is_read = False
        self.is_used = True
        self._depth = 0
        self._is_backward = self._is_called = self._has_failed = False
        named = ((_of_library(n), p) for n, p in sharded.wrapper.raw_param.items() if p.requires_grad)
        self._reached_again = ReachedAgain(named, self._check_begun)
        check_gathers_of_backward(sharded.wrapper, self._check_begun)
        for parameter in sharded.stepped:
            parameter.register_post_accumulate_grad_hook(self._refuse_own_gradient)
        self._written = WrittenCopies()
        for module in modules:
            for part in _outside_of_units(module, sharded.units):
                # Before the library's own hook, which gathers what it finds in place.
                part.register_forward_pre_hook(self._enter, prepend=True)
                part.register_forward_hook(self._leave, always_call=True)
                is_unit = isinstance(part, sharded.units)
                refuse_written_weights(part, _all_parameters if is_unit else _own_parameters)
            if isinstance(module, sharded.units):
                self._watch_parts(module)

    @contextmanager
    def backward(self) -> Generator[None, None, None]:
        """Surrounds one backward pass."""
        self._begin()
        try:
            yield
        except BaseException:
            self._is_backward, self._has_failed = False, True
            raise
        self._end()

    def warn_of_others(self) -> None:
        """Warn that a checkpoint lacks gradients of an optimizer, while another one has taken a step."""
        warn_once(_OF_OTHERS)

    def _enter(self, module: nn.Module, args: tuple) -> None:
        self._depth += 1
        if self._is_called and not is_in_backward():  # nobody has said that it failed
            self._is_backward, self._has_failed = False, True
        if self._is_backward:
            return
        self._recover()
        if self._depth == 1:
            self._written.check(_of_library)
            self.sharded.places.check()
            self._reached_again.begin_forward()
            self.sharded.begin_forward()
        parts = module.parameters() if isinstance(module, self.sharded.units) else module.parameters(recurse=False)
        self._reached_again.call(module, parts)

    def _watch_parts(self, unit: nn.Module) -> None:
        """Follow calls of parts of a model that is one unit, such as its encoder alone; an error where it is freed."""
        for name, part in unit.named_modules():
            if part is not unit:
                part.register_forward_pre_hook(partial(self._enter_part, f"{type(unit).__name__}.{name}"), prepend=True)
                part.register_forward_hook(self._leave, always_call=True)

    def _enter_part(self, name: str, part: nn.Module, args: tuple) -> None:
        self._enter(part, args)
        if self._depth > 1 or self._is_backward:
            return
        if self.sharded.frees_units:
            raise ValueError(f"{name} is called by itself, and is a part of {name.partition('.')[0]}, {_IN_A_UNIT}")
        self.sharded.wrapper.all_gather_and_wait_parameters_ready(list(part.parameters()), prefetch=False)

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> Any:
        self._depth -= 1
        if self._depth > 0 or self._is_backward:
            return output
        begins = differentiable(output)
        is_trained = bool(begins) and not self.is_read
        self.sharded.end_forward(is_trained)
        if is_trained and not self.sharded.frees_units:
            self._written.note(self.sharded.wrapper.raw_param.items())
        if begins:
            register_multi_grad_hook(begins, self._begin_if_called, mode="any")
            for tensor in begins:  # before the library's hooks
                let_last_hook_run_first(tensor)
        return output

    def _begin_if_called(self, gradient: Tensor) -> None:
        """Begin a backward pass that somebody calls as ``loss.backward()``; a hook of outputs."""
        refuse_second_order("a model that Megatron-FSDP shards", "use DDPStrategy, or FSDP2TPStrategy with tp alone")
        if self._is_backward:
            return
        if any(map(is_accumulated_now, self.sharded.trained)):
            self._begin()
            self._is_called = True
            after_backward(self._end)
        else:  # torch.autograd.grad, with respect to inputs
            self._is_backward = True
            self.sharded.begin_forward()
            after_backward(self._leave_gradient)

    def _check_begun(self) -> None:
        """Refuse a backward pass that began behind no output, of which nobody has told the library."""
        if not self._is_backward:
            self._has_failed = True
            raise ValueError(
                "a backward pass reached parameters that Megatron-FSDP shards, and began at a tensor that their model "
                "did not return, such as one that a hook or an attribute has kept; use self.manual_backward(loss) in "
                "place of loss.backward(), add that loss to one of what the model returns, or return the tensor "
                "(output_hidden_states=True)"
            )

    def _refuse_own_gradient(self, _: Tensor) -> None:
        """Refuse a gradient of a parameter that the optimizer has: the end of the pass writes another there."""
        if self._is_backward:
            raise ValueError(_ITSELF)

    def _leave_gradient(self) -> None:
        self._is_backward = False
        self.sharded.end_forward(is_trained=True)

    def _recover(self) -> None:
        self._is_called = False
        if self._has_failed:
            self._has_failed = False
            self.sharded.abandon()

    def _begin(self) -> None:
        self._recover()
        self._written.check(_of_library)
        self._reached_again.begin_backward()
        self.sharded.begin_backward(is_last=not self.is_accumulating)
        self._is_backward = True

    def _end(self) -> None:
        self._is_backward = self._is_called = self.is_used = False
        self.sharded.end_backward()


def _of_library(key: Hashable) -> str:
    """Name a parameter by its name in the library's wrapper: within a list of all modules that are sharded together."""
    return str(key).partition(".")[2]


def _all_parameters(unit: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for part in unit.modules():
        yield from _own_parameters(part)


def _own_parameters(part: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    yield from ((part, name, parameter) for name, parameter in own_parameters(part).items() if parameter is not None)


def _outside_of_units(module: nn.Module, units: tuple[type[nn.Module], ...]) -> Iterator[nn.Module]:
    yield module
    if not isinstance(module, units):
        for child in module.children():
            yield from _outside_of_units(child, units)
