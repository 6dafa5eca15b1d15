"""Runs a part that is called by itself inside of a forward pass of its model, whose hooks put parameters in place.

::

    embedding(ids)         -->  model(ids): its hooks gather --> the embedding's own forward --> its hooks
    model(inputs_embeds=...)

So do an encoder in ``generate``, a vision tower in ``get_image_features``, and in the code of a user's the embedding,
the decoder without its head, or the head. Parts are what stands outside of blocks: of what is in blocks a model has
much, and each of it would ask in each pass. Methods that give features run so as well where their module holds
parameters itself (``image_newline``, ``query_tokens``), which they read between the parts that they call.
"""

import functools
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn

from lightning_automodel.modules.forward import wrap_forward
from lightning_automodel.modules.structure import CONTAINERS, find_blocks, outermost
from lightning_automodel.parallel.guards.hooks_of_users import without_hooks_of_users

_MODEL = "_model_of_this_part"
_PARTS = "_parts_outside_of_blocks"
_RUNNING = "_forward_pass_is_running"
_INSTEAD = "_forward_of_a_part_instead"
_FEATURES = re.compile(r"get_\w+_features")


def run_parts_inside(model: nn.Module) -> None:
    """Make calls of parts of ``model`` outside of its forward pass gather what they need.

    A model without blocks is called as a whole.
    """
    blocks = find_blocks(model)
    outside = [part for name, part in model.named_modules() if name and outermost(list(blocks), name) is None]
    parts = [p for p in outside if not isinstance(p, CONTAINERS) and next(p.parameters(), None) is not None]
    if not blocks or not parts:
        return
    wrap_forward(model, _around_model)
    for part in parts:
        wrap_forward(part, _around_part)
    vars(model)[_PARTS] = parts
    for module in (*parts, *blocks.values()):
        vars(module)[_MODEL] = model  # no child, and a deep copy of the model has its own
    for module in (model, *parts):
        _wrap_features(module)


def parts_of(model: nn.Module) -> list[nn.Module]:
    """List the parts of ``model`` that run inside of a forward pass of it."""
    return vars(model).get(_PARTS, [])


def gather_only(model: nn.Module) -> None:
    """Call ``model`` with nothing in the place of its forward pass: its hooks run."""
    _run_inside(model, lambda: None)


def _run_inside(model: nn.Module, function: Callable[[], Any]) -> Any:
    model.__dict__[_INSTEAD] = function
    with without_hooks_of_users([model]):  # it is not called by its user
        return model()


@contextmanager
def own_parameters_whole(module: nn.Module) -> Generator[None, None, None]:
    """Let code of ``module`` outside of forward passes read the parameters that it holds itself as those passes do.

    They are copies: nothing that needs a gradient runs within this context. All ranks enter it together.
    """
    model, names = vars(module).get(_MODEL, module), [name for name, _ in module.named_parameters(recurse=False)]
    copies: dict[str, Any] = {}
    if names and parts_of(model):
        with torch.no_grad():
            _run_inside(model, lambda: copies.update({name: getattr(module, name).clone() for name in names}))
        vars(module).update(copies)  # before its parameters, which hooks change meanwhile
    try:
        yield
    finally:
        for name in copies:
            vars(module).pop(name, None)


def is_called_alone(block: nn.Module) -> bool:
    """Tell whether ``block`` is called outside of the forward pass of its model; backward passes recompute so, too."""
    model = block.__dict__.get(_MODEL)
    return model is not None and not model.__dict__.get(_RUNNING)


def is_run_for_a_part(model: nn.Module) -> bool:
    """Tell, in front of the forward pass of ``model``, whether a part of it runs in its place, with other arguments."""
    return _INSTEAD in model.__dict__


def _around_model(model: nn.Module, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    instead = model.__dict__.pop(_INSTEAD, None)
    if model.__dict__.get(_RUNNING):
        return forward(*args, **kwargs)
    model.__dict__[_RUNNING] = True
    try:
        return (instead or forward)(*args, **kwargs)
    finally:
        model.__dict__[_RUNNING] = False


def _wrap_features(module: nn.Module) -> None:
    """Run methods of ``module`` that give features as a call of it would, if it holds what they may read."""
    if next(module.parameters(recurse=False), None) is None:
        return
    for name in filter(_FEATURES.fullmatch, dir(type(module))):
        vars(module)[name] = MethodType(_as_part(getattr(type(module), name)), module)


def _as_part(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def features(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _around_part(self, functools.partial(method, self), args, kwargs)

    return features


def _around_part(part: nn.Module, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    model = part.__dict__.get(_MODEL, part)
    if model.__dict__.get(_RUNNING):
        return forward(*args, **kwargs)
    model.__dict__[_INSTEAD] = forward
    try:
        with without_hooks_of_users([model]):  # it is not called by its user
            return model(*args, **kwargs)
    finally:
        model.__dict__.pop(_INSTEAD, None)
