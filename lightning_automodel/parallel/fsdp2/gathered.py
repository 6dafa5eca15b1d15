"""Looks after what an FSDP2 model holds gathered behind a forward pass: copies, which nobody may change or keep."""

import functools
from collections.abc import Hashable, Iterable
from typing import Any, cast
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_automodel._compat.dtensor.tensors import take_given_data, times_data_was_given
from lightning_automodel._compat.fsdp2.gathers import forget_gathered_ahead
from lightning_automodel._compat.fsdp2.units import (
    clear_behind_copies,
    disagreeing_parameters,
    fsdp_units,
    gathered_copies,
    is_copied_from,
    is_kept_gathered,
    note_what_trains,
    replaced_parameters,
)
from lightning_automodel._compat.torch.clearing import clear_with_others
from lightning_automodel._compat.torch.modules import own_parameters
from lightning_automodel._compat.torch.tensors import is_in_backward
from lightning_automodel.distributed.second_order import refuse_second_order
from lightning_automodel.modules.parameter_swap import describe_replaced, stands_for_parameter
from lightning_automodel.modules.structure import class_names
from lightning_automodel.parallel.fsdp2.laid_gradients import lay_gradients
from lightning_automodel.parallel.guards.gather_order import note_gathers
from lightning_automodel.parallel.guards.written_copies import WrittenCopies
from lightning_automodel.parallel.hidden_outputs import differentiable

_IS_READ = "_is_called_to_be_read"


def watch_gathered(model: nn.Module) -> None:
    """Free an FSDP2 root where no backward pass follows its forward pass, and refuse what would need its copies later:
    stale ones, and gradients of gradients. What shards get beside what copies get is laid as they lie.
    """
    units = fsdp_units(model)
    behind = _LooksBehind(model, units)
    model.register_forward_pre_hook(_CheckCopies(units), prepend=True)
    model.register_forward_pre_hook(behind.check_writes, prepend=True)
    model.register_forward_pre_hook(lambda *unused: forget_gathered_ahead(units), prepend=True)
    for unit in units:  # any of them may be called by itself
        assert isinstance(unit, nn.Module)
        unit.register_forward_pre_hook(_TakesData(), prepend=True)
    model.register_forward_hook(behind)
    clear_with_others(behind)
    _watching().add(behind)
    note_gathers(model)
    lay_gradients(model)


def call_to_read(roots: Iterable[FSDPModule], is_read: bool) -> None:
    """Say whether forward passes of ``roots`` from now on are called to be read (in a hook, for a metric): no backward
    pass follows, whatever their outputs say.
    """
    for root in roots:
        vars(root)[_IS_READ] = is_read


def free(units: Iterable[FSDPModule]) -> None:
    """Free what no backward pass needs: models that were called to be read (a teacher, one that others train against).

    What is gathered is a copy: it would not notice that ``requires_grad`` of a parameter changes before the next
    forward pass, and changes of its values by hand would be lost.
    """
    freed = set(units)
    for behind in list(_watching()):
        if not freed.isdisjoint(behind.units):
            behind.check_writes()
    for unit in freed:
        if not is_kept_gathered(unit):
            unit.reshard()


def free_copies(units: Iterable[FSDPModule], optimizer: Optimizer) -> None:
    """Free the copies of what ``optimizer`` changes: a forward pass would compute with them as they were.

    A backward pass whose forward pass was before, if there is one to come, gathers again.
    """
    changed = {p for group in optimizer.param_groups for p in group["params"]}
    for unit in units:
        if is_copied_from(unit, changed) and not is_kept_gathered(unit):
            unit.reshard()


@functools.cache
def _watching() -> "WeakSet[_LooksBehind]":
    """Return what looks behind forward passes; it is told of each step of an optimizer, by whatever loop."""
    told: WeakSet[_LooksBehind] = WeakSet()

    def tell(optimizer: Optimizer, *unused: Any) -> None:
        for behind in list(told):
            free_copies(behind.units, optimizer)

    register_optimizer_step_post_hook(tell)
    return told


class _TakesData:
    """Gathers what a user gave parameters by ``p.data = value``: a forward pre-hook."""

    def __init__(self) -> None:
        self._seen = times_data_was_given()

    def __call__(self, unit: nn.Module, args: tuple) -> None:
        if self._seen != (times := times_data_was_given()):
            take_given_data(unit)
            self._seen = times


class _CheckCopies:
    """Checks that what is gathered trains what is to be trained, and is what the modules have: a forward pre-hook.

    Args:
        units: of the model; looking for them in each pass would take longer than the check.
    """

    def __init__(self, units: list[FSDPModule]) -> None:
        self._units = units

    def __call__(self, model: nn.Module, args: tuple) -> None:
        for owner, name in replaced_parameters(self._units):
            if not stands_for_parameter(own_parameters(owner)[name]):  # where a model calls itself
                raise ValueError(describe_replaced(model, own_parameters(owner), name))
        if torch.is_grad_enabled() and next(disagreeing_parameters(model, self._units), None) is not None:
            raise ValueError(
                f"requires_grad of parameters of {class_names(model)[0]} changed between a forward pass and its "
                "backward pass, while their copies were gathered; change it before the forward pass, or behind the "
                "backward pass, and call a model whose loss is not used within torch.no_grad()"
            )


class _LooksBehind:
    """Looks whether a backward pass follows: a forward hook. Until it comes, modules have copies in place of shards.

    Args:
        model: names of parameters in messages are those in it.
        units: of the model.
    """

    def __init__(self, model: nn.Module, units: list[FSDPModule]) -> None:
        self.units = units
        self._model = ref(model)
        self._written = WrittenCopies()

    def check_writes(self, *unused: Any) -> None:
        """Refuse what was written into copies behind the last forward pass; a forward pre-hook, too."""
        self._written.check(self._describe)

    def _describe(self, key: Hashable) -> str:
        owner, name = cast(tuple[nn.Module, str], key)
        model = self._model()
        assert model is not None
        path = next((f"{path}." for path, part in model.named_modules() if part is owner and path), "")
        return f"{path}{name} of {class_names(model)[0]}"

    def _begin_backward(self, gradient: Tensor) -> None:
        self.check_writes()
        _check_order(gradient)

    def clear(self, parameters: set[Tensor], set_to_none: bool) -> None:
        """Clear the gradients of shards, of which ``zero_grad`` of a module has met the copies."""
        clear_behind_copies(self.units, parameters, set_to_none)

    def __call__(self, model: nn.Module, args: tuple, output: Any) -> None:
        if is_in_backward():
            return  # recomputed by a user's own checkpointing: the backward pass goes on with what is gathered
        if not (begins := differentiable(output)) or vars(model).get(_IS_READ):
            free(self.units)
        elif not torch.compiler.is_compiling():
            note_what_trains(self.units)
            self._written.note(((owner, name), copy) for owner, name, copy in gathered_copies(self.units))
            register_multi_grad_hook(begins, self._begin_backward, mode="any")


def _check_order(grad: Tensor) -> None:
    """Refuse ``create_graph=True``: the graph of that pass holds parameters that FSDP2 frees behind it.

    On CPU the second pass would end the process, and with parameters kept, embeddings would have no gradient.
    """
    refuse_second_order(
        "a model that FSDP2 shards over data ranks",
        "use DDPStrategy, or tp alone (one data rank, nothing cast)",
    )
