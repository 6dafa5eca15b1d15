"""Finds the classes of models that transformers does not have: code that lies beside the config they were read from."""

import json
from dataclasses import dataclass
from typing import Any

import transformers
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from lightning_automodel.modules.structure import class_in_source


@dataclass(frozen=True)
class Classes:
    """Of a model, and of its config."""

    model: type[PreTrainedModel]
    config: type[PreTrainedConfig]


def classes_of(model: PreTrainedModel) -> Classes:
    """Return the classes of a model that is there."""
    return Classes(class_in_source(type(model)), type(model.config))


def classes_beside(architecture: str, config: str, source: str, *, trusts: bool) -> Classes | None:
    """Load the classes of a model whose code lies beside its config.

    Args:
        architecture: name of the model's class.
        config: of the model, JSON.
        source: directory or name on the hub that it was read from.
        trusts: whether that code may run.

    Returns:
        ``None`` for a model that has no such code, or whose class transformers has, too, unless its own is trusted.

    Raises:
        ValueError: for code that is not trusted, or cannot be read.
    """
    values = json.loads(config)
    references: dict[str, Any] = values.get("auto_map") or {}
    auto_class = next((auto for auto, name in references.items() if str(name).endswith(f".{architecture}")), None)
    if auto_class is None or (not trusts and hasattr(transformers, architecture)):
        return None
    if not trusts:
        raise ValueError(
            f"{architecture} comes with code of its own, which lies at {source!r}; once you have read it, allow it to "
            "run with --trust_remote_code=true (of evaluate and generate: --model_kwargs.trust_remote_code=true)"
        )
    try:
        model: Any = get_class_from_dynamic_module(references[auto_class], source)
        path = references.get("AutoConfig")
        own: Any = None if path is None else get_class_from_dynamic_module(path, source)
    except (OSError, ValueError) as error:  # no directory, and no name on the hub
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise ValueError(
            f"the code of {architecture} cannot be read at {source!r}: {reason}. Put that back, or name a "
            "directory that holds it beside config.json with --model_config"
        ) from error
    model.register_for_auto_class(auto_class)  # its files are written beside the weights
    if own is None:
        return Classes(model, type(AutoConfig.for_model(values["model_type"])))
    own.register_for_auto_class()
    return Classes(model, own)
