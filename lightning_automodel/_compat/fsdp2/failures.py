"""Lets FSDP2 go on behind a forward or a backward pass that an exception has ended, where the caller goes on.

FSDP2 keeps its notes of the pass: later passes compute with what was gathered for it, whatever has been stepped or
loaded since, and their gradients are not reduced at the end. ``reset_iter_state`` (from torch 2.13 on) would have to be
called, and drops the gradients of earlier micro-batches where only a forward pass failed::

    forward pass      units that it was in are freed, and the others when the model itself is left
    backward pass     all is freed, and gradients that were not reduced are dropped, when a unit is next called
"""

import logging
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from lightning_automodel._compat.fsdp2.units import parameter_groups_of
from lightning_automodel._compat.fsdp2.waiting import clear_gradient_of, waiting_in
from lightning_automodel._compat.torch.tensors import is_in_backward

_DROPPED = (
    "an exception ended a backward pass, and gradients that were not reduced yet are dropped, those of earlier "
    "micro-batches of the step among them; call zero_grad() and begin the step anew"
)
logger = logging.getLogger(__name__)


def go_on_after_failures(modules: Iterable[nn.Module]) -> None:
    """Let the modules of an FSDP2 unit begin anew after an exception, which all ranks have had."""
    for module in modules:
        module.register_forward_pre_hook(_begin, prepend=True)
        module.register_forward_hook(_end, always_call=True)


def _begin(module: nn.Module, args: tuple) -> None:
    """Free what a backward pass through an FSDP2 unit has left gathered, if an exception ended it."""
    state: Any = fully_shard.state(module)  # type: ignore[attr-defined]
    context = state._state_ctx
    if not context.post_backward_final_callback_queued or is_in_backward():
        return
    context.post_backward_final_callback_queued = False
    _free(context.all_states)
    groups = [group for each in context.all_states for group in parameter_groups_of(each)]
    if any(group._partial_reduce_output is not None or any(waiting_in(group)) for group in groups):
        logger.warning(_DROPPED)
    for group in groups:
        group._partial_reduce_output = None
        for held in group.fsdp_params:
            clear_gradient_of(held)
        type(group).finalize_backward(group)  # waits for reductions that were begun
    state._comm_ctx.post_forward_order.clear()


def _end(module: nn.Module, args: tuple, output: Any) -> None:
    state: Any = fully_shard.state(module)  # type: ignore[attr-defined]
    if output is None and state._training_state == TrainingState.FORWARD:  # FSDP2's own hook was not called
        _free(state._state_ctx.all_states if state._is_root else [state])


def _free(states: Iterable[Any]) -> None:
    for state in states:
        state._training_state = TrainingState.IDLE
        state._modules_to_run_forward.clear()
        for group in parameter_groups_of(state):
            group._training_state = TrainingState.IDLE
            group.wait_for_unshard()  # of what was gathered ahead
            group.reshard()
        if state._is_root and hasattr(state._state_ctx, "iter_forward_root"):
            state._state_ctx.iter_forward_root = None
