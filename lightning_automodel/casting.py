"""Computes in a narrower dtype than parameters are stored in, as FSDP2 does it, for models that FSDP2 does not wrap.

While a block runs, and the model for the rest, modules see ``parameter.to(dtype)``, and floating-point inputs are cast.
Gradients come back in the dtype of the parameter. Installed as forward hooks and attributes, which a copy of the model
carries along.
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_automodel.blocks import find_blocks, outermost
from lightning_automodel.calls import Context, keep_for_recomputation
from lightning_automodel.sharding import find_float32

_CAST = "_parameters_cast_by_lightning_automodel"
_SWAPPED = "_swapped_by_casting"
_Swapped = list[tuple[nn.Module, str, nn.Parameter]]


@dataclass
class _Cast:
    """What a unit casts: parameters by the module that has them and their names."""

    dtype: torch.dtype
    owners: list[tuple[nn.Module, str]]


def install_compute_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Makes ``model`` compute in ``dtype``, in place, except with parameters that it keeps in float32.

    Args:
        model: with parameters of any dtypes, called as a whole.
        dtype: of compute.
    """
    keep = find_float32(model)
    blocks = find_blocks(model)
    units = {name: _Cast(dtype, []) for name in ("", *blocks)}
    for module_name, module in model.named_modules():
        unit = outermost(list(blocks), module_name) or ""
        units[unit].owners += [
            (module, name) for name, p in module._parameters.items() if p is not None and _is_cast(p, keep)
        ]
    for name, cast in units.items():
        unit_module = model.get_submodule(name)
        setattr(unit_module, _CAST, cast)
        unit_module.register_forward_pre_hook(_enter, with_kwargs=True)
        unit_module.register_forward_hook(_leave, always_call=True)
        keep_for_recomputation(unit_module, _cast_again)


def _is_cast(parameter: nn.Parameter, keep: set[nn.Parameter]) -> bool:
    return parameter.is_floating_point() and parameter not in keep


def _enter(unit: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    unit.__dict__.setdefault(_SWAPPED, []).append(_swap_in(unit))
    dtype = getattr(unit, _CAST).dtype

    def narrowed(value: Tensor) -> Tensor:
        return value.to(dtype) if value.is_floating_point() else value

    return apply_to_collection(args, Tensor, narrowed), apply_to_collection(kwargs, Tensor, narrowed)


def _leave(unit: nn.Module, args: tuple, output: Any) -> None:
    if swapped := unit.__dict__.get(_SWAPPED):  # nothing, if a hook before raised
        _swap_out(swapped.pop())


def _cast_again(unit: nn.Module) -> Context:
    @contextmanager
    def cast_again() -> Generator[None, None, None]:
        swapped = _swap_in(unit)
        try:
            yield
        finally:
            _swap_out(swapped)

    return cast_again


def _swap_in(unit: nn.Module) -> _Swapped:
    cast: _Cast = getattr(unit, _CAST)
    narrow: dict[Tensor, Tensor] = {}
    swapped: _Swapped = []
    for module, name in cast.owners:
        parameter = module._parameters[name]
        if not isinstance(parameter, nn.Parameter):
            continue  # narrow tensors are in place already
        if parameter not in narrow:
            narrow[parameter] = parameter.to(cast.dtype)
        module._parameters[name] = narrow[parameter]  # type: ignore[assignment]
        swapped.append((module, name, parameter))
    return swapped


def _swap_out(swapped: _Swapped) -> None:
    for module, name, parameter in swapped:
        module._parameters[name] = parameter
