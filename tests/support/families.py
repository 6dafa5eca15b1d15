"""Tiny models of every family of transformers: the real classes, with configs shrunk by the names of their fields."""

import dataclasses
import inspect
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from tests.support.sizes import SMALL, SPECIAL, TOWER

MOST_PARAMETERS = 20_000_000
TEXT = ("text_config", "decoder", "dit_config")
FIRST_SPECIAL_ID = 100
"""Token ids from here on stand for images and their like in a model that reads them, never for text."""


def causal_families(with_plan: bool = True) -> list[str]:
    """Model types of causal language models, with or without a tensor-parallel plan of their own.

    Those that read images as well are in :func:`image_text_families`.
    """
    return [
        name
        for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if name in CONFIG_MAPPING
        and name not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        and bool(getattr(CONFIG_MAPPING[name], "base_model_tp_plan", None)) == with_plan
    ]


def image_text_families() -> list[str]:
    """Model types of models that read images and write text."""
    return [name for name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES if name in CONFIG_MAPPING]


def tiny_model(family: str, attention: str = "eager", experts: str | None = None, **changes: Any) -> nn.Module:
    """A causal or image-and-text model in float32, drawn from a fixed seed; no vector or zero stays as it is.

    Args:
        family: its model type.
        attention: transformers' name of its implementation.
        experts: the same for experts; ``None``: transformers' choice.
        changes: fields of the language model's config.

    Raises:
        RuntimeError: if the config still makes a large model.
    """
    images = family in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    auto_class: Any = AutoModelForImageTextToText if images else AutoModelForCausalLM
    config = tiny_config(family, **changes)
    config.use_cache = config.get_text_config(decoder=True).use_cache = False
    implementations = {"attn_implementation": attention, **({"experts_implementation": experts} if experts else {})}
    with torch.device("meta"):
        model = auto_class.from_config(config, dtype=torch.float32, **implementations)
    size = sum(p.numel() for p in model.parameters())
    if size > MOST_PARAMETERS:
        raise RuntimeError(f"{family} has {size / 1e6:.0f} M parameters with the tiny config")
    torch.manual_seed(0)
    model = auto_class.from_config(config, dtype=torch.float32, **implementations)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim <= 1 or not parameter.any():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model


def tiny_config(family: str, **changes: Any) -> PreTrainedConfig:
    """The family's config with every size of :data:`~tests.support.sizes.SMALL` that it has, sub-configs included."""
    config_class = CONFIG_MAPPING[family]
    if not config_class.sub_configs:
        special = _for_layers(SPECIAL.get(family, {}), changes.get("num_hidden_layers"))
        changed = _known(config_class, changes, SimpleNamespace(**special))
        return config_class(**{**_known(config_class, SMALL), **special, **changed})
    return _tiny_composite(config_class(), SMALL, changes)


def _for_layers(special: dict[str, Any], count: int | None) -> dict[str, Any]:
    """What is listed per layer, for another number of layers: the same kinds in turn."""
    if count is None:
        return special
    listed = {name: values for name, values in special.items() if name.endswith("layer_types")}
    return {**special, **{name: [values[i % len(values)] for i in range(count)] for name, values in listed.items()}}


def _tiny_composite(default: PreTrainedConfig, sizes: dict[str, Any], changes: dict[str, Any]) -> PreTrainedConfig:
    config_class = type(default)
    parts: dict[str, Any] = {}
    for name, part_class in (config_class.sub_configs or {}).items():
        part = getattr(default, name, None)
        if part is None and part_class is not AutoConfig and name != "audio_config":
            part = part_class()
        if isinstance(part, PreTrainedConfig):
            parts[name] = _tiny_part(name, part, changes)
    values = _known(config_class, {**sizes, **_special_ids(default)}, default)
    return config_class(**{**values, **parts, **SPECIAL.get(default.model_type, {})})


def _tiny_part(name: str, default: PreTrainedConfig, changes: dict[str, Any]) -> PreTrainedConfig:
    if default.sub_configs:
        return _tiny_composite(default, SMALL, changes)
    if name in TEXT:
        reads = {"is_decoder": True, "add_cross_attention": True} if name == "decoder" else {}
        return tiny_config(default.model_type, **_special_ids(default), **reads, **changes)
    return _tiny_composite(default, TOWER, {})


def _special_ids(default: PreTrainedConfig) -> dict[str, int]:
    """A token id of the tiny vocabulary for every field that names one outside of it."""
    names = sorted(name for name in vars(default) if name.endswith(("token_id", "token_index", "patch_id")))
    text = ("decoder_start_token_id", "forced_eos_token_id", "forced_bos_token_id", *SMALL)
    used = [n for n in names if n not in text and (getattr(default, n) is not None or n.startswith("image_token"))]
    return {name: FIRST_SPECIAL_ID + i for i, name in enumerate(used)}


def _known(
    config_class: type[PreTrainedConfig],
    values: dict[str, Any],
    default: PreTrainedConfig | SimpleNamespace | None = None,
) -> dict[str, Any]:
    """The ``values`` that are fields of the config; one per entry where the ``default`` is a list."""
    if dataclasses.is_dataclass(config_class):
        known = {field.name for field in dataclasses.fields(config_class)}
    else:
        known = set(inspect.signature(config_class.__init__).parameters)
    found = {name: value for name, value in values.items() if name in known}
    for name, value in found.items():
        entries = getattr(default, name, None)
        if isinstance(entries, list | tuple) and isinstance(value, int):
            found[name] = [value] * len(entries)
    return found
