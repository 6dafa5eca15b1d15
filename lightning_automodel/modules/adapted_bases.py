"""Remembers which frozen parameters below adapters are as in the files that were read: checkpoints leave them out."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from lightning_automodel.modules.wrappers import is_wrapper, name_without_wrappers

_FROM_FILES = "_names_that_lie_in_files"
_LEAVES_BASE = (True, False, "gaussian", "eva")
"""Initializations of adapters that do not change what they adapt."""


def note_files(model: nn.Module, names: Iterable[str]) -> None:
    """Remember which parameters of ``model`` were read from files, with the names of those that are tied to them."""
    named, read = list(model.named_parameters(remove_duplicate=False)), set(names)
    tensors = {id(parameter) for name, parameter in named if name in read}
    vars(model)[_FROM_FILES] = frozenset(name for name, parameter in named if id(parameter) in tensors)


def names_from_files(model: nn.Module) -> frozenset[str]:
    """Name the parameters of ``model`` that are as in the files that were read; names without wrappers."""
    return vars(model).get(_FROM_FILES, frozenset())


def forget_files(model: nn.Module, changed: Iterable[str]) -> None:
    """Forget parameters that are not as in the files any more, by their present names. Copies that train are others."""
    names = {name_without_wrappers(name) for name in changed if not _is_copy(name)}
    vars(model)[_FROM_FILES] = names_from_files(model) - names


def forget_files_below(module: nn.Module, changed: Iterable[str]) -> None:
    """Forget parameters of ``module``, which holds the models that were read, by their present names in it."""
    changed = list(changed)
    for prefix, model in module.named_modules():
        if _FROM_FILES in vars(model):
            start = f"{prefix}." if prefix else ""
            forget_files(model, (name.removeprefix(start) for name in changed if name.startswith(start)))


def names_left_out(module: Any) -> set[str]:
    """Name the parameters of a LightningModule that its checkpoints leave out; none if it says ``saves_base``."""
    return set() if getattr(module, "saves_base", False) else set(_bases(module))


def names_left_out_of(part: nn.Module, module: Any) -> set[str]:
    """Name the parameters of ``part`` that checkpoints of the LightningModule which it is in leave out."""
    return set() if getattr(module, "saves_base", False) else names_left_out(part)


def _bases(module: nn.Module) -> Iterator[str]:
    for prefix, model in module.named_modules():
        names = names_from_files(model)
        if not names or not _is_unchanged(model):
            continue
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if not parameter.requires_grad and not _is_copy(name) and name_without_wrappers(name) in names:
                yield f"{prefix}.{name}" if prefix else name


def _is_copy(name: str) -> bool:
    return ".modules_to_save." in name


def _is_unchanged(model: nn.Module) -> bool:
    configs = getattr(model, "peft_config", None) or {}
    adapted = any(is_wrapper(child) for child in model.modules())
    return adapted and all(getattr(c, "init_lora_weights", True) in _LEAVES_BASE for c in configs.values())
