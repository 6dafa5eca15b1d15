"""Activation checkpointing of blocks: what the backward pass needs is saved in part and computed again in part."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_automodel._compat import wrap_call
from lightning_automodel.blocks import find_blocks, find_towers, outermost

_ATEN = torch.ops.aten
_ATTENTION = {
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
}
_MATRIX_PRODUCTS = {_ATEN.mm.default, _ATEN.addmm.default}
_CACHES = ("past_key_values", "past_key_value", "layer_past")


def get_lm_ac_layers(model: nn.Module) -> list[nn.Module]:
    """The blocks of the language model, whose activations are worth recomputing; those of towers are not among them."""
    towers = list(find_towers(model))
    return [block for name, block in find_blocks(model).items() if outermost(towers, name) is None]


def apply_selective_activation_checkpointing(model: nn.Module, enable_compile: bool = False) -> None:
    """While ``model`` trains, its blocks keep the results of attention and of every second matrix product only.

    The rest is computed again in the backward pass, with the same random numbers, so that all results are the same.

    Args:
        model: before or after it was made parallel; changed in place.
        enable_compile: not available yet.

    Raises:
        ValueError: if ``enable_compile`` is set.
    """
    if enable_compile:
        raise ValueError("enable_compile=True is not available in this version; leave it at False")
    for block in get_lm_ac_layers(model):
        wrap_call(block, lambda call, block=block: _checkpointed(call, block))  # type: ignore[misc]


def _checkpointed(call: Callable, block: nn.Module) -> Callable:
    """Around the whole call, hooks included: the recomputation needs the local tensors that they put in place."""

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not (block.training and torch.is_grad_enabled()):
            return call(*args, **kwargs)
        if not getattr(block, "_can_checkpoint_with_cache", False):
            # A cache would be written a second time.
            kwargs |= {name: None for name in _CACHES if name in kwargs}
            kwargs |= {"use_cache": False} if "use_cache" in kwargs else {}
        return checkpoint(call, *args, use_reentrant=False, context_fn=_selective_contexts, **kwargs)

    return checkpointed


def _selective_contexts() -> tuple[Any, Any]:
    products: dict[bool, int] = defaultdict(int)

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operation in _MATRIX_PRODUCTS:
            products[context.is_recompute] += 1
            saved = products[context.is_recompute] % 2 == 1
        else:
            saved = operation in _ATTENTION
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
