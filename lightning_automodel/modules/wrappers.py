"""Wrappers that stand in the places of layers: peft's, and others like them.

A wrapper has the layer below it as ``base_layer``, or as ``original_module`` beside copies that train in its place
(``modules_to_save``); one that trains single tokens has a wrapper as ``token_adapter``. Names and classes that a rule
knows are those of the model without them.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_automodel._compat.torch.modules import own_children

STEPS = ("base_layer", "token_adapter", "original_module")
"""Names below which a wrapper holds the layer."""

TASKS = "MULTITASK_PROMPT_TUNING"
"""The kind of prompts of which peft calls the encoder to read a saved one, and past its forward pass to write it."""

_WRAPPERS = re.compile(r"\.(base_layer|original_module|token_adapter|modules_to_save\.[^.]+)(?=\.|$)")


def is_wrapper(module: nn.Module) -> bool:
    """Tells whether ``module`` stands in the place of a layer that it holds."""
    return "base_layer" in own_children(module) or "token_adapter" in own_children(module) or has_copies(module)


def has_copies(module: nn.Module) -> bool:
    """Tells whether ``module`` holds a layer and what runs in its place."""
    return "original_module" in own_children(module) and len(own_children(module)) > 1


def unwrapped(module: Any) -> Any:
    """Return the layer inside of wrappers, or ``module`` itself if it is no wrapper."""
    while isinstance(module, nn.Module) and is_wrapper(module):
        module = next(own_children(module)[step] for step in STEPS if step in own_children(module))
    return module


def find_adapted_parameters(module: nn.Module) -> Iterator[tuple[nn.Module, nn.Module, str]]:
    """Find the wrappers that adapt one parameter of a layer (peft's ``target_parameters``), the layers, its names."""
    for wrapper in module.modules():
        if is_wrapper(wrapper) and hasattr(wrapper, "parameter_name"):
            yield wrapper, unwrapped(wrapper), wrapper.parameter_name  # type: ignore[misc]


def merged_layers(module: nn.Module) -> list[str]:
    """Name the wrappers that have added their adapters to the weights of their layers (``merge_adapter`` of peft)."""
    return [name for name, m in module.named_modules() if is_wrapper(m) and getattr(m, "merged", False) is True]


def name_without_wrappers(name: str) -> str:
    """Return the name that a parameter or module of a wrapped layer has in the model without wrappers."""
    return _WRAPPERS.sub("", name)


@contextmanager
def without_wrappers(model: nn.Module) -> Iterator[bool]:
    """Put wrapped layers in the places of their wrappers within this context. Yields whether there are any."""
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    for module in list(model.modules()):
        for name, child in module.named_children():
            if is_wrapper(child) and not is_wrapper(module):
                replaced.append((module, name, child))
    for parent, name, child in replaced:
        own_children(parent)[name] = unwrapped(child)
    try:
        yield bool(replaced)
    finally:
        for parent, name, child in replaced:
            own_children(parent)[name] = child


def adapters_of(model: nn.Module) -> set[nn.Parameter]:
    """Collect the parameters that wrappers add to ``model``."""
    with without_wrappers(model):
        of_layers = set(model.parameters())
    return set(model.parameters()) - of_layers


def within_adapters(model: nn.Module) -> nn.Module:
    """Return the model in whose layers adapters of peft lie, or beside which prompts do; ``model`` if there is none, or
    something else lies beside (a bank of vectors).
    """
    base = _base(model)
    known = {p for part in (base, *prompt_encoders(model)) for p in part.parameters()}
    return base if known >= set(model.parameters()) else model


def prompt_encoders(model: nn.Module) -> list[nn.Module]:
    """List what learns beside the model that peft's ``model`` holds: encoders of prompts, one for each adapter."""
    of_base = set(_base(model).parameters())
    beside = [child for child in model.children() if of_base.isdisjoint(child.parameters())]
    each = [m for child in beside for m in (child.children() if isinstance(child, nn.ModuleDict) else [child])]
    return [encoder for encoder in each if next(encoder.parameters(), None) is not None]


def _base(model: nn.Module) -> nn.Module:
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
