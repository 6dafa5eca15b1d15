"""Lets FSDP2 reduce gradients that some ranks have and others lack, and those that wait where no backward pass comes.

FSDP2 reduces the gradients of a unit that a rank has, and takes those of other ranks for the same. Two heads of one
unit, of which the samples choose::

                    GPU 0               GPU 1
    gradients of    heads.0             heads.1               FSDP2: the sum of both becomes a gradient of either
    reduced         heads.0  0   1 0    0  heads.1   0 1      zeros for what a rank lacks, and which it has
    sums            heads.0  heads.1  1 1                     0 in the place of 1: no rank has one, and it stays None

Which gradients there are goes along in the same buffer, so nothing more is sent.
"""

import math
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard

from lightning_automodel._compat.fake.shapes import is_fake
from lightning_automodel._compat.fsdp2.hooks import HooksOnSums
from lightning_automodel._compat.fsdp2.units import parameter_groups, parameter_groups_of
from lightning_automodel._compat.fsdp2.waiting import (
    clear_gradient_of,
    complete,
    end_backward_pass,
    gradient_of,
    waiting_in,
    was_gathered,
)
from lightning_automodel._compat.torch.clearing import clear_no_more, clear_with_others
from lightning_automodel._compat.torch.tensors import version_of

Note = Callable[[int, list[bool], list[Tensor]], None]
"""Takes the number of a group, which of its parameters take part in a reduction, and these."""
_WAITING = "_gradients_that_wait"
_ORDER = "_reduce_scatter_param_indices"
"""from torch 2.15 on: the order of a group's parameters in a reduction"""
_SOME_CLEARED = (
    "zero_grad() between the micro-batches of a step clears some parameters of a layer and not others, and with "
    "defer_fsdp_grad_sync=False their gradients wait in one tensor; clear all of them, or leave it at True"
)
_numbers = count()


def reduce_what_any_rank_has(unit: FSDPModule, note: Note) -> None:
    """Let an FSDP2 unit reduce each gradient that any rank has, and leave ``None`` where no rank has one.

    Args:
        unit: whose parameters that require a gradient are the same on all ranks.
        note: called before each reduction.
    """
    for group in parameter_groups(unit):
        reduction = _Reduction(group, fully_shard.state(unit), note)  # type: ignore[attr-defined]
        group.post_backward = partial(reduction.run, group.post_backward)
        group.finalize_backward = partial(reduction.end, group.finalize_backward)


def reduce_what_waits(units: Iterable[FSDPModule]) -> None:
    """Reduce gradients of earlier micro-batches in models that the last one did not use: nothing else would.

    FSDP2 does it when the backward pass that comes through a model ends. Collective: all ranks have called the same
    models.
    """
    states = [fully_shard.state(unit) for unit in units]  # type: ignore[attr-defined]
    waiting = [state for state in states if any(map(_only_waits, parameter_groups_of(state)))]
    for state in {id(state._state_ctx): state for state in waiting}.values():
        end_backward_pass(state)


def some_wait(units: Iterable[FSDPModule]) -> bool:
    """Tell whether gradients of earlier micro-batches wait, and nothing holds them back any more."""
    return any(_only_waits(group) for unit in units for group in parameter_groups(unit))


class _Reduction:
    """What a group of parameters does behind its backward pass, with flags of the gradients that this rank has."""

    def __init__(self, group: Any, state: Any, note: Note) -> None:
        self.group, self.state, self.note, self.number = group, state, note, next(_numbers)
        sizes = (getattr(group.mesh_info, name, 1) for name in ("shard_mesh_size", "replicate_mesh_size"))
        self.ranks = math.prod(sizes)
        self.flags = _Flags(group.mesh_info)
        self.hooks = HooksOnSums(group)
        self.absent: dict[Any, list[tuple[_Sums, int]]] = {}  # parameters that had none before, with where to look
        self.given: dict[Any, tuple[int, int]] = {}  # what the reduction gave to these

    def run(self, post_backward: Callable, *unused: Any) -> None:
        """Run FSDP2's own ``post_backward`` with zeros for what this rank lacks, and with the flags."""
        group = self.group
        if not any(was_gathered(held) for held in group.fsdp_params):
            return  # never called; FSDP2 would look for gradients to widen all the same
        takes_part = [_takes_part(held) for held in group.fsdp_params]
        trained = [held for held, takes in zip(group.fsdp_params, takes_part, strict=True) if takes]
        if not trained or not group.reduce_grads or self.ranks == 1:
            self.hooks.reduce(partial(post_backward, *unused), trained, ())
            self._note_what_waits()
            return
        self.note(self.number, takes_part, [held.sharded_param for held in trained])
        self._keep_what_others_gave()
        has = [gradient_of(held) is not None for held in trained]
        sums = self.flags.mark(_marked(has, complete(group, trained), group.device))
        for held in (held for held, there in zip(trained, has, strict=True) if not there):
            if held.sharded_param.grad is None:
                self.absent.setdefault(held, [])
        with self._with_flags():
            self.hooks.reduce(partial(post_backward, *unused), trained, self.absent)
        self._note_what_waits()
        for i, held in enumerate(trained):
            if held in self.absent:  # a model that was called twice is reduced twice
                self.absent[held].append((sums, i))
                self.given[held] = _state_of_gradient(held)

    @contextmanager
    def _with_flags(self) -> Generator[None, None, None]:
        group, own = self.group, self.group.fsdp_params
        order = getattr(group, _ORDER, None)
        group.fsdp_params = [*own, self.flags]
        if order is not None:
            setattr(group, _ORDER, [*order, len(own)])
        try:
            yield
        finally:
            group.fsdp_params = own
            if order is not None:
                setattr(group, _ORDER, order)

    def end(self, finalize_backward: Callable) -> None:
        """Take away the zeros of parameters that no rank has used, when the sums are there; waits for them."""
        finalize_backward()
        self._keep_what_others_gave()
        for held, places in self.absent.items():
            if not any(sums.counts(i) for sums, i in places):
                held.sharded_param.grad = None
        self.absent.clear()
        self.given.clear()
        self.hooks.end()
        self.flags.sharded_param = _Sums()  # the sums lie in one tensor with the gradients
        if self.group.reduce_grads:
            self.reduce_others()

    def _keep_what_others_gave(self) -> None:
        """Take out of ``absent`` what autograd has added to since: a user computed with the parameter itself, by
        ``full_tensor()`` in front of the model, through which the backward pass comes last.
        """
        for held in [held for held, state in self.given.items() if _state_of_gradient(held) != state]:
            del self.absent[held], self.given[held]

    def _note_what_waits(self) -> None:
        group = self.group
        setattr(group, _WAITING, list(waiting_in(group)))
        if not group.reduce_grads:
            _put_aside[self.number] = self
        if getattr(group, _WAITING) or group._partial_reduce_output is not None:
            clear_with_others(self)
        else:
            clear_no_more(self)

    def clear(self, parameters: set[Tensor], set_to_none: bool) -> None:
        """Clear what waits of ``parameters``.

        Raises:
            ValueError: for some parameters of a group whose sums over shards wait, in one tensor, for replicas.
        """
        group = self.group
        if group._partial_reduce_output is not None:
            trained = {held.sharded_param for held in group.fsdp_params if held.sharded_param.requires_grad}
            if trained <= parameters:
                group._partial_reduce_output = None
            elif trained & parameters:
                raise ValueError(_SOME_CLEARED)
        for held in (held for held in group.fsdp_params if held.sharded_param in parameters and was_gathered(held)):
            if set_to_none:
                clear_gradient_of(held)
            elif (gradient := gradient_of(held)) is not None:
                gradient.zero_()
        self._note_what_waits()

    def reduce_others(self) -> None:
        """Reduce what waits in other models that the backward pass did not come through, and which is let go now."""
        released = {number: other for number, other in sorted(_put_aside.items()) if other.group.reduce_grads}
        waiting = [other.state for other in released.values() if _only_waits(other.group)]
        own = self.state._state_ctx
        for state in {id(state._state_ctx): state for state in waiting if state._state_ctx is not own}.values():
            end_backward_pass(state)
        for number in released:
            _put_aside.pop(number, None)


_put_aside: WeakValueDictionary[int, _Reduction] = WeakValueDictionary()
"""Those with gradients that wait, in the order in which the groups were made, which all ranks have."""


class _Sums:
    """Stands for the shard of :class:`_Flags`: ``grad`` is [1, parameters], of how many ranks have a gradient."""

    def __init__(self) -> None:
        self.grad: Tensor | None = None

    def counts(self, index: int) -> bool:
        """Tell whether any rank has a gradient of a parameter; not while the sum over the replicas is still to come."""
        return self.grad is not None and not is_fake(self.grad) and bool(self.grad[0, index])


class _Flags:
    """Stands among the parameters of a group while it is reduced: [ranks, parameters], 1 where a rank has a gradient.

    It has what FSDP2 asks of a parameter there; each rank gets the row of sums. It is the same object in all reductions
    of a step, by which torch 2.15 knows what its sums over shards are.
    """

    def __init__(self, mesh_info: Any) -> None:
        self.ranks = getattr(mesh_info, "shard_mesh_size", 1)
        self.fsdp_placement = Shard(0)
        self.offload_to_cpu = False
        self.sharded_param = _Sums()
        self.unsharded_accumulated_grad = self.unsharded_grad_dtype = self.sharded_grad_dtype = None

    def mark(self, flags: Tensor) -> _Sums:
        """Take ``flags`` [parameters] to the next reduction.

        Returns:
            what their sums come to.
        """
        self.unsharded_param = self._unsharded_param = SimpleNamespace(grad=flags.expand(self.ranks, -1).contiguous())
        self.sharded_size = self.padded_sharded_param_size = torch.Size((1, len(flags)))
        self.contiguous_sharded_stride = (len(flags), 1)
        self.sharded_param = _Sums()
        return self.sharded_param

    @property
    def unsharded_grad_data(self) -> Tensor:
        """Return what is reduced."""
        return self.unsharded_param.grad

    def to_sharded_dtensor(self, tensor: Tensor) -> Tensor:
        return tensor

    def to_sharded(self) -> None:
        pass

    def accumulate_unsharded_grad_if_needed(self) -> None:
        pass


def _marked(flags: list[bool], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return ``flags`` as numbers; a list would be copied to the device, and the host would wait."""
    marks = torch.ones(len(flags), dtype=dtype, device=device)
    for i in (i for i, flag in enumerate(flags) if not flag):
        marks[i].zero_()
    return marks


def _takes_part(held: Any) -> bool:
    """Tell whether a parameter may get a gradient, or has one of a micro-batch in which it might."""
    return held._unsharded_param.requires_grad or gradient_of(held) is not None


def _state_of_gradient(held: Any) -> tuple[int, int]:
    gradient = held.sharded_param.grad
    return id(gradient), -1 if gradient is None else version_of(gradient)


def _only_waits(group: Any) -> bool:
    """Tell whether a group has gradients that it put aside, and nothing has been added to them since."""
    kept = getattr(group, _WAITING, [])
    if not kept or not group.reduce_grads:
        return False
    now = list(waiting_in(group))
    return [(id(x), version) for x, version in kept] == [(id(x), version) for x, version in now]
