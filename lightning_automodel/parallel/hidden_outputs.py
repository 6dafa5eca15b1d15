"""Finds the tensors of an output in which FSDP2 sees none, so that its backward pass is seen.

FSDP2 hooks onto the tensors that a module returns: their gradients tell it when to gather the module's parameters, and
that gradients are to be reduced. It looks for them in tuples, dicts and dataclasses, and not in an object of another
class. A model without blocks that returned such an object trained without a word: on each rank with the gradients of
its own samples. Nor does it look into caches of keys and values, through which the loss of a pass reaches the blocks of
passes before it.
"""

import gc
from collections.abc import Mapping
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_automodel._compat.fsdp2.units import watch_outputs
from lightning_automodel._compat.torch.pytree import tree_leaves
from lightning_automodel.modules.caches import kept_in_caches, new_in_caches
from lightning_automodel.modules.forward import named_arguments

_DEPTH = 4  # of containers in an object
_ELSEWHERE = (type, ModuleType, FunctionType, nn.Module)  # what an object refers to, and does not hold


def watch_hidden_outputs(module: nn.Module) -> None:
    """Show FSDP2, of which ``module`` is a unit, the tensors that an output, or a cache, hides from it."""
    module.register_forward_hook(_watch, with_kwargs=True)
    if any(isinstance(part, FSDPModule) and part is not module for part in module.modules()):
        module.register_forward_hook(_watch_caches, with_kwargs=True)


def differentiable(output: Any) -> list[Tensor]:
    """Find the tensors with which a backward pass may begin, in what a module returned, hidden ones too."""
    if not torch.is_grad_enabled():
        return []
    return _shown(output) or _hidden(output)


def _watch(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
    if not torch.is_grad_enabled():
        return
    hidden = [] if isinstance(output, Tensor) or _shown(output) else _hidden(output)
    if hidden or (hidden := new_in_caches(named_arguments(module, args, kwargs))):
        watch_outputs(module, hidden)


def _watch_caches(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
    """Let a unit around others know of passes that a later one comes back to, through what its blocks kept: FSDP2 has
    freed it behind that one, if a gradient reached what entered the unit there (the states of an encoder).
    """
    returned = output if isinstance(output, Mapping) else {}
    if torch.is_grad_enabled() and (kept := kept_in_caches({**returned, **named_arguments(module, args, kwargs)})):
        watch_outputs(module, kept)


def _shown(output: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]


def _hidden(output: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _collect(output, found, _DEPTH)
    return found


def _collect(value: Any, found: list[Tensor], depth: int) -> None:
    if isinstance(value, Tensor):
        found += [value] if value.requires_grad else []
    elif depth and not isinstance(value, _ELSEWHERE):
        for held in gc.get_referents(value):
            _collect(held, found, depth - 1)
