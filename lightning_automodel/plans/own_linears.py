"""Tries linear layers and embeddings that run code of somebody's on parts of their weight, before a plan splits them.

::

    colwise    layer(x) with the upper rows of the weight       =  the first features of layer(x)
    rowwise    layer(left of x) with the left columns + ...     =  layer(x)

A layer that takes a mean of its whole weight, or rounds its input by the largest of all features, has neither.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lightning_automodel._compat.dtensor.tensors import StridedShard
from lightning_automodel._compat.torch.modules import own_buffers, own_parameters
from lightning_automodel.modules.authors import place_of
from lightning_automodel.modules.forward import code_of
from lightning_automodel.modules.matrices import WIDTH_OF_VIEW, Matrix, in_features, is_turned, out_features
from lightning_automodel.plans.known_code import KNOWN, is_known
from lightning_automodel.plans.styles import Style

_ROWS, _TOLERANCE = 3, 1e-3
_COLUMNS = ("rowwise", "rowwise_split_input", "rowwise_rep", "rowwise_split_output", "packed_rowwise")
_TRIED = (
    *("colwise", "interleaved_colwise", "colwise_gather_output", "colwise_rep", "packed_colwise", "packed_qkv_colwise"),
    *(*_COLUMNS, "embedding_rowwise"),
)
_CANNOT = (RuntimeError, AttributeError, AssertionError, TypeError, ValueError, IndexError)


def problem_of_own_linear(module: nn.Module, style: Style) -> str:
    """Say what a layer of a user's code would do otherwise on slices of its weight; empty if nothing is known."""
    if not isinstance(module, Matrix | nn.Embedding):
        return "" if is_known(module) else _problem_of_members(module, style)
    if place_of(code_of(module)).partition(".")[0] in (*KNOWN, "bitsandbytes"):
        return ""
    more = [name for name in own_parameters(module) if name not in ("weight", "bias")]
    if more:
        return (
            f"its class has parameters beside weight and bias ({', '.join(more)}), of which it is not known how they "
            "are split; use tp=1, or a torch.nn.Linear with an adapter of peft"
        )
    dim = style.placement("weight", 2)
    if style.name not in _TRIED or type(module.weight) is not nn.Parameter or dim.is_replicate():
        return ""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        is_right = (
            _looks_up(module)
            if isinstance(module, nn.Embedding)
            else _is_right_on_parts(module, rows=style.name not in _COLUMNS)
        )
    if is_right:
        return ""
    return (
        "its forward pass is the user's, and gives other numbers with a part of the weight than with the whole (it "
        "takes a mean or maximum over all of it, or of all features of its input or output, or reads rows of a table "
        "without torch.nn.functional.embedding); leave it whole, with the "
        "rule 'replicate' for it and for the modules that compute with its features, or use tp=1"
    )


def _problem_of_members(module: nn.Module, style: Style) -> str:
    """Say what a layer of a user's class holds that its style does not cut like its weight."""
    cut = {
        name: style.placement(name, p.ndim) for name, p in own_parameters(module).items() if p is not None and p.ndim
    }
    sizes = {
        name: module.get_parameter(name).shape[placement.dim]
        for name, placement in cut.items()
        if isinstance(placement, Shard | StridedShard)
    }
    inside = [name for name, _ in module.named_parameters() if "." in name]
    if not sizes or (len(set(sizes.values())) == 1 and not inside):
        return ""
    return (
        f"its class has parameters that are not cut alike ({', '.join([*sizes, *inside])}), of which it is not known "
        "how they are split; use tp=1, a torch.nn.Linear with an adapter of peft, or a rule 'replicate' for it and for "
        "the modules that compute with its features"
    )


def _looks_up(module: nn.Module) -> bool:
    """Compare what an embedding gives for the first ids with what it gives with a table of their rows alone.

    Lookups of other rows are the other ranks'. Ids count from 0 in both.
    """
    table = torch.randn(tuple(module.weight.shape), generator=torch.Generator().manual_seed(0))  # type: ignore[arg-type]
    table[len(table) // 2 :] *= 4
    ids = torch.arange(len(table) // 2)[None]
    try:
        with _Lookups() as lookups:
            whole = _call(module, ids, table, None)
    except _CANNOT:
        return True
    if not lookups.count:  # a rank would look up rows that others have
        return False
    try:
        return torch.allclose(whole, _call(module, ids, table[: len(table) // 2], None), atol=_TOLERANCE)
    except _CANNOT:
        return False


class _Lookups(TorchFunctionMode):
    """Counts lookups in tables by torch's function, which tensor parallelism takes over."""

    count = 0

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += func is functional.embedding
        return func(*args, **(kwargs or {}))


def _is_right_on_parts(module: Matrix, rows: bool) -> bool:
    """Compare the layer, with weights drawn at random, with its two halves, of which one is larger than the other."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0), device="cpu")
    x, weight = draw(_ROWS, in_features(module)), draw(out_features(module), in_features(module))
    bias = None if module.bias is None else draw(out_features(module))
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
    except _CANNOT:
        return True  # it cannot be called like that: what it does is seen in the first forward pass


def _call(module: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Run the layer with other parameters in their places: what is assigned to ``forward`` may hold the layer."""
    parameters, buffers, attributes = own_parameters(module), own_buffers(module), vars(module)
    changed = {"training": False, **({WIDTH_OF_VIEW: len(weight)} if is_turned(module) else {})}
    before = dict(parameters), dict(buffers), {name: attributes[name] for name in changed}
    values = {"weight": weight.T if is_turned(module) else weight, "bias": bias}
    try:
        for name, value in values.items():
            if name in parameters:
                parameters[name] = None if value is None else nn.Parameter(value, requires_grad=False)
        buffers.update({name: None if buffer is None else buffer.clone() for name, buffer in buffers.items()})
        attributes.update(changed)
        return module.forward(x)
    finally:
        parameters.update(before[0])
        buffers.update(before[1])
        attributes.update(before[2])
