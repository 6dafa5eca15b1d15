"""LoRA on stacked experts: rows pass through the narrow factors, instead of weights that were added up before.

::

    peft     W' = W + s B A for all experts, in every pass and recomputation;    y = x W'^T;   d W' -> d A, d B
    here     y = x W^T + s (x A^T) B^T, all grouped products;                    d A, d B from rows

Weights of all experts are written and read three times less, none is kept for the backward pass, and no gradient of
their size exists. In bfloat16 the sum W' also rounds away most of what small factors add.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import pad

from lightning_automodel._compat.torch.modules import own_parameters
from lightning_automodel._compat.transformers.experts import (
    LowRankSum,
    run_grouped_products,
    runs_grouped_products,
)
from lightning_automodel.modules.forward import wrap_forward
from lightning_automodel.modules.wrappers import find_adapted_parameters

_WRAPPERS = "_wrappers_that_adapt_its_experts"
_ALIGNMENT = 16  # bytes: what grouped products want of rows


def keep_factors_apart(model: nn.Module) -> None:
    """Let rows pass through the factors of LoRA on stacked experts of ``model``, where the products are grouped.

    To be called before anything else is put around these modules: it is the innermost.
    """
    found: dict[nn.Module, list[Any]] = {}
    for wrapper, layer, _ in find_adapted_parameters(model):
        found.setdefault(layer, []).append(wrapper)
    for layer, wrappers in found.items():
        wrap_forward(layer, _with_factors)
        for module in (layer, *wrappers):
            vars(module)[_WRAPPERS] = wrappers
        for wrapper in wrappers:
            wrap_forward(wrapper, _adapt)


def _adapt(wrapper: Any, forward: Callable[..., Tensor], args: tuple, kwargs: dict[str, Any]) -> Tensor:
    adapters, layer = _active(wrapper), wrapper.get_base_layer()
    if not adapters or not _is_wide(own_parameters(layer)[wrapper.parameter_name]):
        return forward(*args, **kwargs)
    if _is_apart(layer):
        return wrapper.base_layer(*args, **kwargs)
    weight = own_parameters(layer)[wrapper.parameter_name]
    with torch.autocast(weight.device.type, enabled=False):
        for adapter in adapters:
            weight = weight + wrapper.get_delta_weight(adapter)
    path, module = wrapper.parameter_name, wrapper.base_layer
    while module is not layer:
        path, module = f"base_layer.{path}", module.base_layer
    return functional_call(wrapper.base_layer, {path: weight}, args, kwargs)


def _active(wrapper: Any) -> list[str]:
    if wrapper.disable_adapters or wrapper.merged:
        return []
    return [name for name in wrapper.active_adapters if name in wrapper.lora_A]


def _is_wide(weight: Tensor) -> bool:
    return weight.is_floating_point() and weight.dtype.itemsize > 1


def _with_factors(experts: Any, forward: Callable[..., Tensor], args: tuple, kwargs: dict[str, Any]) -> Tensor:
    if not _is_apart(experts):
        return forward(*args, **kwargs)
    sums = {wrapper.parameter_name: _sum_of(experts, wrapper) for wrapper in vars(experts)[_WRAPPERS]}
    return run_grouped_products(_Stand(experts, sums), args, kwargs)


def _is_apart(experts: nn.Module) -> bool:
    """Tell whether each of the wrappers adds one adapter to weights that are stored as they are computed with."""
    return runs_grouped_products(experts) and all(
        len(_active(wrapper)) == 1
        and wrapper.num_experts > 1
        and _is_wide(own_parameters(experts)[wrapper.parameter_name])
        for wrapper in vars(experts)[_WRAPPERS]
    )


def _sum_of(experts: Any, wrapper: Any) -> LowRankSum:
    left, right, scale = wrapper.get_delta_factors(_active(wrapper)[0])  # shaped like the weight: left @ right
    first, second = (left, right) if experts.is_transposed else (right.mT, left.mT)
    rank = first.shape[-1]
    if missing := -rank % (_ALIGNMENT // first.element_size()):
        first, second = pad(first, (0, missing)), pad(second, (0, 0, 0, missing))
    weight = own_parameters(experts)[wrapper.parameter_name]
    assert weight is not None
    return LowRankSum(weight, _aligned(first), second.contiguous(), scale)


def _aligned(factor: Tensor) -> Tensor:
    return factor if factor.mT.is_contiguous() else factor.contiguous()


class _Stand:
    """Stands for a module of experts, of which some parameters are sums."""

    def __init__(self, module: nn.Module, sums: dict[str, LowRankSum]) -> None:
        self._module, self._sums = module, sums

    def __getattr__(self, name: str) -> Any:
        return self._sums[name] if name in self._sums else getattr(self._module, name)
