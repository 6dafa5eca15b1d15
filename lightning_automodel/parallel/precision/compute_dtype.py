"""Computes in a narrower dtype than parameters are stored in, as FSDP2 does it, for models that FSDP2 does not wrap.

While a block runs, and the model for the rest, modules see ``parameter.to(dtype)``, and floating-point inputs are cast.
Gradients come back in the dtype of the parameter. Installed as forward hooks and attributes, which a copy of the model
carries along.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_automodel._compat.torch.modules import own_parameters
from lightning_automodel.modules.parameter_swap import ParameterSwap
from lightning_automodel.modules.structure import computes_in_float32, find_blocks, outermost


def install_compute_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Makes ``model`` compute in ``dtype``, in place, except with parameters that it keeps in float32.

    Args:
        model: with parameters of any dtypes, called as a whole.
        dtype: of compute.
    """
    keep = find_float32(model)
    blocks = find_blocks(model)
    swaps = {name: ParameterSwap() for name in ("", *blocks)}
    sizes: dict[str, Counter[tuple[torch.dtype, bool]]] = {name: Counter() for name in swaps}
    cast = Cast(dtype)
    for module_name, module in model.named_modules():
        owner_name = outermost(list(blocks), module_name) or ""
        for name, parameter in own_parameters(module).items():
            if parameter is None or not (parameter.is_floating_point() or parameter.is_complex()):
                continue
            stays = parameter in keep or parameter.is_complex()
            sizes[owner_name][parameter.dtype, stays] += parameter.numel()
            if not stays:
                swaps[owner_name].add(module, name, cast)
    for name, swap in swaps.items():
        owner = model.get_submodule(name)
        swap.install(owner)
        largest = max(sizes[name], key=sizes[name].__getitem__, default=None)  # says so, as of a unit of FSDP2
        if largest is None or not largest[1]:
            owner.register_forward_pre_hook(cast.inputs, with_kwargs=True)


@dataclass(frozen=True)
class Cast:
    """Cast floating-point tensors to ``dtype``."""

    dtype: torch.dtype

    def __call__(self, value: Tensor) -> Tensor:
        """Cast one tensor, with autograd; integers stay."""
        return value.to(self.dtype) if value.is_floating_point() else value

    def inputs(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Cast what ``module`` is called with: a forward pre-hook."""
        return apply_to_collection(args, Tensor, self), apply_to_collection(kwargs, Tensor, self)


def find_float32(model: nn.Module) -> set[nn.Parameter]:
    """Find parameters that are stored and used in float32, or wider, whatever the policy says.

    Those that the model wants so, and those that are stored so beside others of lower precision: that is on purpose.
    """
    mixed = any(p.is_floating_point() and p.dtype.itemsize < 4 for p in model.parameters())
    return {
        parameter
        for name, parameter in model.named_parameters()
        if computes_in_float32(model, name)
        or parameter.dtype == torch.float64
        or (mixed and parameter.dtype == torch.float32)
    }
