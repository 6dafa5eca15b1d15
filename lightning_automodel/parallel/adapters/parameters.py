"""What peft adds to single parameters (``target_parameters``), computed so that graphs and experts are served.

::

    peft     W' = W + s B A in each pass and recomputation, two times: it checks what it registers
    here     W' = W + s B A in each, once
    experts  y = x W^T + s (x A^T) B^T, where their products are grouped: W' of all experts is never made, none is kept
             for the backward pass, and no gradient of its size exists

A graph cannot hold what peft registers. In bfloat16 the sum W' rounds away most of what small factors add.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import pad

from lightning_automodel._compat.torch.modules import own_parameters
from lightning_automodel._compat.transformers.experts import (
    LowRankSum,
    chooses_function,
    replace_grouped_products,
    run_grouped_products,
    runs_grouped_products,
)
from lightning_automodel.modules.forward import wrap_forward
from lightning_automodel.modules.wrappers import find_adapted_parameters

_WRAPPERS = "_wrappers_that_adapt_its_parameters"
_RUNS = "_runs_now"
_ALIGNMENT = 16  # bytes: what grouped products want of rows


def compute_adapted_parameters(model: nn.Module) -> None:
    """Compute what wrappers add to single parameters of ``model`` here, in place of peft.

    To be called before anything else is put around these layers: it is the innermost.
    """
    found: dict[nn.Module, list[Any]] = {}
    for wrapper, layer, _ in find_adapted_parameters(model):
        found.setdefault(layer, []).append(wrapper)
    if found:
        replace_grouped_products()
        _register_lay_out()
    for layer, wrappers in found.items():
        if chooses_function(layer):
            vars(layer)[_WRAPPERS] = wrappers
            wrap_forward(layer, _with_factors)
        for wrapper in wrappers:
            vars(wrapper)[_RUNS] = False
            wrap_forward(wrapper, _adapt)


def _adapt(wrapper: Any, forward: Callable[..., Tensor], args: tuple, kwargs: dict[str, Any]) -> Tensor:
    adapters, layer, weight = _active(wrapper), wrapper.get_base_layer(), _weight_of(wrapper)
    if not adapters or not _is_wide(weight):
        return forward(*args, **kwargs)
    if _is_apart(layer):
        return _run(wrapper, args, kwargs)
    with torch.autocast(weight.device.type, enabled=False):
        weight = _add(wrapper, weight, adapters)
    path, module = wrapper.parameter_name, wrapper.base_layer
    while module is not layer:
        path, module = f"base_layer.{path}", module.base_layer
    return functional_call(wrapper.base_layer, {path: weight}, args, kwargs)


def _add(wrapper: Any, weight: Tensor, adapters: Sequence[str]) -> Tensor:
    """Add adapters to a weight; one of stacked experts as peft does, without a second tensor of their size."""
    if len(adapters) == 1 and wrapper.num_experts > 1:
        left, right, scale = wrapper.get_delta_factors(adapters[0])
        return torch.baddbmm(weight, left, right, alpha=scale)
    for adapter in adapters:
        weight = weight + wrapper.get_delta_weight(adapter)
    return weight


def _run(wrapper: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """Call what ``wrapper`` surrounds, which adds what it adapts: a layer that is called by itself does not."""
    setattr(wrapper, _RUNS, True)
    try:
        return wrapper.base_layer(*args, **kwargs)
    finally:
        setattr(wrapper, _RUNS, False)


def _active(wrapper: Any) -> list[str]:
    if wrapper.disable_adapters or wrapper.merged:
        return []
    return [name for name in wrapper.active_adapters if name in wrapper.lora_A]


def _weight_of(wrapper: Any) -> Tensor:
    weight = own_parameters(wrapper.get_base_layer())[wrapper.parameter_name]
    assert weight is not None
    return weight


def _is_wide(weight: Tensor) -> bool:
    return weight.is_floating_point() and weight.dtype.itemsize > 1


def _with_factors(experts: Any, forward: Callable[..., Tensor], args: tuple, kwargs: dict[str, Any]) -> Tensor:
    running = [wrapper for wrapper in vars(experts)[_WRAPPERS] if getattr(wrapper, _RUNS)]
    if not running:
        return forward(*args, **kwargs)
    sums = {wrapper.parameter_name: _sum_of(experts, wrapper) for wrapper in running}
    return run_grouped_products(_Stand(experts, sums), args, kwargs)


def _is_apart(experts: nn.Module) -> bool:
    """Tell whether each of the wrappers adds one adapter to weights that are stored as they are computed with."""
    return (
        _WRAPPERS in vars(experts)
        and runs_grouped_products(experts)
        and all(
            len(_active(wrapper)) == 1 and wrapper.num_experts > 1 and _is_wide(_weight_of(wrapper))
            for wrapper in vars(experts)[_WRAPPERS]
        )
    )


def _sum_of(experts: Any, wrapper: Any) -> LowRankSum:
    left, right, scale = wrapper.get_delta_factors(_active(wrapper)[0])  # shaped like the weight: left @ right
    first, second = (left, right) if experts.is_transposed else (right.mT, left.mT)
    rank = first.shape[-1]
    if missing := -rank % (_ALIGNMENT // first.element_size()):
        first, second = pad(first, (0, missing)), pad(second, (0, 0, 0, missing))
    return LowRankSum(_weight_of(wrapper), first, _laid_out(second), scale)


def _laid_out(factor: Tensor) -> Tensor:
    if torch.compiler.is_compiling():
        return torch.ops.lightning_automodel.lay_out(factor)
    return factor.contiguous()


class _Stand:
    """Stands for a module of experts, of which some parameters are sums."""

    def __init__(self, module: nn.Module, sums: dict[str, LowRankSum]) -> None:
        self._module, self._sums = module, sums

    def __getattr__(self, name: str) -> Any:
        return self._sums[name] if name in self._sums else getattr(self._module, name)


@cache
def _register_lay_out() -> None:
    """Register an operation that copies a factor within a graph so that its last dimension is contiguous.

    There ``factor.contiguous()`` becomes a kernel that keeps the order in memory of what it reads, and grouped products
    on CUDA refuse what it writes (inductor of torch 2.11).
    """

    @torch.library.custom_op("lightning_automodel::lay_out", mutates_args=())
    def lay_out(factor: Tensor) -> Tensor:
        return factor.clone(memory_format=torch.contiguous_format)

    lay_out.register_fake(lambda factor: factor.new_empty(factor.shape))
    lay_out.register_autograd(lambda ctx, gradient: gradient)
