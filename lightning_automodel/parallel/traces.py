"""Lets a module run once more, for a trial, and leaves no trace of it; finds what a forward pass leaves beside outputs.

What a module of a user keeps of a pass (``self.aux = ...``, ``self.seen.append(...)``) is that of the real pass, and
hooks of users, which may collect values, do not run.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lightning_automodel._compat.torch.modules import hook_tables_of, own_buffers
from lightning_automodel._compat.torch.pytree import tree_map
from lightning_automodel._compat.transformers.models import without_recordings
from lightning_automodel.distributed.random_numbers import generator_states, restore_generators
from lightning_automodel.parallel.guards.hooks_of_users import without_hooks_of_users
from lightning_automodel.plans.linearity import tensors

NARROW = (torch.bfloat16, torch.float16)
_OTHERS = (*NARROW, torch.float64)
_OF_TORCH = frozenset(vars(nn.Module()))
_DROPOUTS = (functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d)


@contextmanager
def leaving_no_trace(module: nn.Module) -> Generator[None, None, None]:
    """Restore modes, attributes, buffers and random numbers of ``module`` behind this context, in which it has no hooks
    of users, and transformers records nothing of it.
    """
    modules, states = list(module.modules()), generator_states()
    modes, attributes = [m.training for m in modules], [_attributes(m) for m in modules]
    tables: list[dict] = [table for m in modules for table in (*hook_tables_of(m), own_buffers(m))]
    contents = [dict(table) for table in tables]
    try:
        with without_hooks_of_users(modules), without_recordings():
            yield
    finally:
        for table, before in zip(tables, contents, strict=True):
            table.clear()
            table.update(before)
        for m, training, values in zip(modules, modes, attributes, strict=True):
            m.training = training
            _restore(m, values)
        restore_generators(states)


def _attributes(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """Note the attributes of a module, and what is in those that are lists and the like."""
    return {
        name: (value, value.copy() if isinstance(value, list | dict | set) else None)
        for name, value in vars(module).items()
        if name not in _OF_TORCH
    }


def _restore(module: nn.Module, values: dict[str, tuple[Any, Any]]) -> None:
    table = vars(module)
    for name in [name for name in table if name not in _OF_TORCH and name not in values]:
        del table[name]
    for name, (value, content) in values.items():
        table[name] = value
        if isinstance(value, list):
            value[:] = content
        elif content is not None:
            value.clear()
            value.update(content)


@contextmanager
def fresh(module: nn.Module, training: bool) -> Generator[dict[str, Tensor], None, None]:
    """Let ``module`` compute in a mode, in float32 and with copies of its buffers, which this context gives."""
    found: dict[str, Tensor] = {}
    tables = [(name, own_buffers(m)) for name, m in module.named_modules()]
    before = [dict(table) for _, table in tables]
    for m in module.modules():
        m.training = training
    try:
        for prefix, table in tables:
            for name, buffer in table.items():
                if buffer is not None:
                    table[name] = found[f"{prefix}.{name}".removeprefix(".")] = in_float32(buffer).clone()
        yield found
    finally:
        for (_, table), values in zip(tables, before, strict=True):
            table.clear()
            table.update(values)


def in_float32(values: Any) -> Any:
    """Return ``values`` with narrow and wide tensors as float32."""
    return tree_map(lambda x: x.float() if isinstance(x, Tensor) and x.dtype in _OTHERS else x, values)


def floating(values: Any) -> list[Tensor]:
    """List the tensors of floating-point numbers in ``values``."""
    return [x for x in tensors(values) if x.is_floating_point()]


class WithoutDropout(TorchFunctionMode):
    """Drops nothing within this context, so that modules can be compared as they train."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is functional.scaled_dot_product_attention:
            args, kwargs = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args, {**kwargs}
            kwargs.pop("dropout_p", None)
        return func(*args, **kwargs)


def left_behind(module: nn.Module) -> list[tuple[nn.Module, str, str]]:
    """Find attributes (owner, name, path) of modules in ``module`` that hold computed tensors of the last pass."""
    return [
        (m, name, f"{prefix}.{name}".removeprefix("."))
        for prefix, m in module.named_modules()
        for name, value in vars(m).items()
        if name not in _OF_TORCH and not isinstance(value, nn.Module) and any(map(_is_computed, tensors(value)))
    ]


def refuse_gradients(owner: nn.Module, name: str, message: str) -> None:
    """Put copies of the tensors that an attribute holds in their places: a gradient of one is an error."""
    value, refusing = vars(owner)[name], lambda x: refused(x, message) if _is_computed(x) else x
    if isinstance(value, list):
        value[:] = tree_map(refusing, value)
    else:
        vars(owner)[name] = tree_map(refusing, value)


def refused(value: Tensor, message: str) -> Tensor:
    """Return ``value``; its gradient is an error with ``message``, unless its node is told to let it pass."""
    return _Refused.apply(value, message)


def _is_computed(value: Any) -> bool:
    return isinstance(value, Tensor) and value.grad_fn is not None and value.grad_fn.name() != "_RefusedBackward"


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, message: str) -> Tensor:
        ctx.message, ctx.passes = message, False
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.passes:
            return grad, None
        raise ValueError(ctx.message)
