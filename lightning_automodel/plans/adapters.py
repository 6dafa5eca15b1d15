"""Layers wrapped by low-rank adapters: the rule about the layer holds for what it wraps, and the adapter follows it.

A wrapper has no parameter of its own, and computes ``base_layer(x) + lora_B(lora_A(x))``, as peft's layers do::

    the rule         base_layer   lora_A                    lora_B
    ---------------  -----------  ------------------------  ----------------------------
    column styles    the rule     whole                     the rule: rows of the output
    row styles       the rule     the rule: columns of the  whole
                                  input, which is split
"""

from collections.abc import Iterator, Mapping

from torch import nn

from lightning_automodel.styles import STYLES, Style

_BASE, _DOWN, _UP = "base_layer", "lora_A", "lora_B"
_COLUMN = ("colwise", "colwise_gather_output", "colwise_rep")
_ROW = ("rowwise", "rowwise_split_input", "rowwise_rep")


def rules_of_wrapped(modules: Mapping[str, nn.Module], module_styles: Mapping[str, Style]) -> dict[str, Style]:
    """The styles of modules, with those about wrappers handed on to what they hold.

    Args:
        modules: all modules of the model by name.
        module_styles: of those that the plan names.
    """
    found: dict[str, Style] = {}
    for name, style in module_styles.items():
        found |= dict(_members(name, modules, style)) if _is_wrapper(modules[name], style) else {name: style}
    return found


def _is_wrapper(module: nn.Module, style: Style) -> bool:
    own = next(module.parameters(recurse=False), None)
    return own is None and isinstance(getattr(module, _BASE, None), nn.Linear) and style.name in _COLUMN + _ROW


def _members(name: str, modules: Mapping[str, nn.Module], style: Style) -> Iterator[tuple[str, Style]]:
    yield f"{name}.{_BASE}", style
    split, whole = (_UP, _DOWN) if style.name in _COLUMN else (_DOWN, _UP)
    for part, given in ((split, style), (whole, STYLES["replicate"])):
        for adapter in getattr(modules[name], part, {}):
            yield f"{name}.{part}.{adapter}", given
