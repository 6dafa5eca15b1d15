"""Tries layers that somebody derived from ``torch.nn.Linear`` on parts of their weight, before a plan splits them.

::

    colwise    layer(x) with the upper rows of the weight       =  the first features of layer(x)
    rowwise    layer(left of x) with the left columns + ...     =  layer(x)

A layer that takes a mean of its whole weight, or rounds its input by the largest of all features, has neither.
"""

import copy
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from lightning_automodel._compat.modules import own_buffers, own_parameters
from lightning_automodel.plans.known_code import KNOWN
from lightning_automodel.plans.styles import Style

_ROWS, _TOLERANCE = 3, 1e-3


def problem_of_own_linear(module: nn.Module, style: Style) -> str:
    """Say what a layer of a user's class would do otherwise on slices of its weight; empty if nothing is known."""
    if not isinstance(module, nn.Linear) or type(module).forward.__module__.partition(".")[0] in (
        *KNOWN,
        "bitsandbytes",
    ):
        return ""
    more = [name for name in own_parameters(module) if name not in ("weight", "bias")]
    if more:
        return (
            f"its class has parameters beside weight and bias ({', '.join(more)}), of which it is not known how they "
            "are split; use tp=1, or a torch.nn.Linear with an adapter of peft"
        )
    dim = style.placement("weight", 2)
    if style.name not in ("colwise", "rowwise") or type(module.weight) is not nn.Parameter or dim.is_replicate():
        return ""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        is_right = _is_right_on_parts(module, rows=style.name == "colwise")
    if is_right:
        return ""
    return (
        "its forward pass is the user's, and gives other numbers with a part of the weight than with the whole (it "
        "takes a mean or maximum over all of it, or of all features of its input); leave it whole, with the rule "
        "'replicate' for it and for the modules that compute with its features, or use tp=1"
    )


def _is_right_on_parts(module: nn.Linear, rows: bool) -> bool:
    """Compare the layer, with weights drawn at random, with its two halves, of which one is larger than the other."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0), device="cpu")
    x, weight = draw(_ROWS, module.in_features), draw(module.out_features, module.in_features)
    bias = None if module.bias is None else draw(module.out_features)
    halves = weight.chunk(2, 0 if rows else 1)
    halves[1].mul_(4)
    none = None if bias is None else torch.zeros_like(bias)
    biases = (bias, none) if bias is None or not rows else bias.chunk(2)
    inputs = (x, x) if rows else x.chunk(2, 1)
    try:
        whole = _call(module, x, weight, bias)
        parts = [_call(module, *part) for part in zip(inputs, halves, biases, strict=True)]
        found = torch.cat(parts, -1) if rows else parts[0] + parts[1]
        return torch.allclose(whole, found, rtol=0, atol=_TOLERANCE * float(whole.abs().max()))
    except (RuntimeError, AttributeError, AssertionError, TypeError, ValueError):
        return True  # it cannot be called like that: what it does is seen in the first forward pass


def _call(module: nn.Linear, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    part = copy.copy(module)
    part.__dict__ = {**module.__dict__, "training": False, "_buffers": dict(_copies(module))}
    values = {"weight": weight, "bias": bias}
    part.__dict__["_parameters"] = {
        name: None if value is None else nn.Parameter(value, requires_grad=False) for name, value in values.items()
    }
    return type(module).forward(part, x)


def _copies(module: nn.Module) -> Iterator[tuple[str, Tensor | None]]:
    for name, buffer in own_buffers(module).items():
        yield name, None if buffer is None else buffer.clone()
