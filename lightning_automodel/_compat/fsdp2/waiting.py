"""Where FSDP2 keeps the gradients of a step's micro-batches until they are reduced.

::

                       in the dtype of the reduction        else
    before torch 2.15  unsharded_accumulated_grad           grad of the gathered parameter
    from 2.15 on       grad of the gathered parameter, which autograd widens; units may mix dtypes

The gathered parameter stays when its memory is freed.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

_HAS_ITS_OWN_PLACE = not isinstance(getattr(FSDPParam, "unsharded_accumulated_grad", None), property)


def was_gathered(held: Any) -> bool:
    """Tell whether FSDP2 has gathered a parameter at all."""
    return hasattr(held, "_unsharded_param")


def gradient_of(held: Any) -> Tensor | None:
    """Return what waits of a parameter that was gathered."""
    if held.unsharded_accumulated_grad is not None:
        return held.unsharded_accumulated_grad
    return held._unsharded_param.grad


def add_up(held: Any) -> None:
    """Let what waits of a parameter in the dtype of the reduction have what the last micro-batch gave."""
    if _HAS_ITS_OWN_PLACE:
        held.accumulate_unsharded_grad_if_needed()


def zeros_of(held: Any) -> Tensor:
    """Return what stands for the gradient of a parameter that was gathered: a sum over the ranks of tp of no terms."""
    return held._get_grad_inner_tensor(torch.zeros_like(held._unsharded_param))


def clear_gradient_of(held: Any) -> None:
    """Leave nothing that waits."""
    if not was_gathered(held):
        return
    if _HAS_ITS_OWN_PLACE:
        held.unsharded_accumulated_grad = None
    held._unsharded_param.grad = None


def waiting_in(group: Any) -> Iterator[tuple[Tensor, int]]:
    """Yield the gradients that a group has not reduced, and what tells whether something was added to them since."""
    for held in group.fsdp_params:
        if was_gathered(held) and (gradient := gradient_of(held)) is not None:
            yield gradient, gradient._version


def complete(group: Any, trained: Sequence[Any]) -> torch.dtype:
    """Give zeros to those of ``trained`` that have no gradient.

    Returns:
        the dtype in which all of them are reduced, on each rank.
    """
    dtype = _one_dtype(trained) if _HAS_ITS_OWN_PLACE else None
    for held in (held for held in trained if gradient_of(held) is None):
        whole = held._unsharded_param
        if dtype is not None:
            held.unsharded_accumulated_grad = torch.zeros_like(whole, dtype=dtype)
        else:
            whole.grad = torch.zeros_like(whole, dtype=whole.grad_dtype)
    return dtype or group._get_reduce_dtype(trained, [gradient_of(held) for held in trained])


def _one_dtype(trained: Sequence[Any]) -> torch.dtype:
    """Give all gradients of a group one dtype, and return it.

    They differ where some were kept in that of the reduction and others come from the last micro-batch alone.
    """
    if any(held.unsharded_accumulated_grad is not None for held in trained):
        for held in trained:
            held.accumulate_unsharded_grad_if_needed()
            held.to_accumulated_grad_if_needed()
    found = (gradient.dtype for held in trained if (gradient := gradient_of(held)) is not None)
    return next(found, trained[0]._unsharded_param.dtype)


def end_backward_pass(state: Any) -> None:
    """Do what FSDP2 does when a backward pass through the model of ``state`` ends."""
    context = state._state_ctx
    if getattr(context, "manual_backward_finalization_active", False) is None:  # from torch 2.15 on: none has begun
        context.manual_backward_finalization_active = False
    state._root_post_backward_final_callback()
