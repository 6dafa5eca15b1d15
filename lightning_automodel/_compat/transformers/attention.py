"""Attention functions of transformers, which a module may put something around; the kernel behind torch's on CPU."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

_AROUND = "_around_attention_functions"
_INSTALLED = "_asks_modules"
MASKS_ARE_TENSORS = ("sdpa", "eager")
"""Attention functions whose masks are tensors [batch, 1, queries, keys]."""


def route_attention(module: nn.Module, around: Callable[..., Any]) -> None:
    """Make ``module`` call ``around(function, module, query, key, ...)`` in the place of attention functions.

    transformers hands them out by name and knows nothing of modules there, and its eager ones are functions of each
    model's file that are in no registry: what it hands out asks the module that calls it. Others are not concerned.
    """
    if not hasattr(AttentionInterface.get_interface, _INSTALLED):
        stock = AttentionInterface.get_interface

        @functools.wraps(stock)
        def get_interface(self: AttentionInterface, *args: Any, **kwargs: Any) -> Callable[..., Any]:
            return _asking(stock(self, *args, **kwargs))

        setattr(get_interface, _INSTALLED, True)
        AttentionInterface.get_interface = get_interface  # type: ignore[method-assign]
    module.__dict__[_AROUND] = around


@functools.cache
def _asking(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def ask(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        around = module.__dict__.get(_AROUND)
        return function(module, *args, **kwargs) if around is None else around(function, module, *args, **kwargs)

    return ask


def route_masks(around: Callable[..., Any]) -> None:
    """Make transformers call ``around(function, **arguments)`` in the place of functions that build masks.

    They are registered by name, for all models of the process: ``around`` finds out whom a call concerns.
    """
    registered = AttentionMaskInterface()
    for name in MASKS_ARE_TENSORS:
        if not hasattr(registered[name], _INSTALLED):
            routed = functools.wraps(registered[name])(functools.partial(around, registered[name]))
            setattr(routed, _INSTALLED, True)
            AttentionMaskInterface.register(name, routed)


# ---- kernels ---------------------------------------------------------------------------------------------------------
# torch's public function keeps the log-sum-exp of each row to itself, which merging parts of one softmax needs.

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def has_flash(query: Tensor) -> bool:
    """Tells whether there is a kernel that gives the log-sum-exp, for tensors like ``query``."""
    return query.device.type == "cpu"


def flash_forward(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Compute attention [batch, heads, queries, dim] and the log-sum-exp of its scores, [batch, heads, queries]."""
    return _FLASH(query, key, value, 0.0, causal, scale=scale)


def flash_backward(
    grad: Tensor,
    query: Tensor,
    output: Tensor,
    log_sum_exp: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of query, key and value; ``output`` and ``log_sum_exp`` may be those of more keys."""
    return _FLASH_BACKWARD(grad, query, key, value, output, log_sum_exp, 0.0, causal, scale=scale)
