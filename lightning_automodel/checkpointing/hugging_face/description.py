"""Describes the Hugging Face models in a checkpoint, so that they can be built again without their module."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, GenerationConfig, PreTrainedModel

from lightning_automodel._compat.transformers.models import source_of
from lightning_automodel.checkpointing.hugging_face.own_code import Classes
from lightning_automodel.modules.structure import class_names
from lightning_automodel.modules.ties import untie, untied_names
from lightning_automodel.modules.wrappers import is_wrapper

DESCRIPTIONS = "hugging_face_models"


@dataclass(frozen=True)
class Description:
    """Describe one model of transformers, so that it can be built again.

    Attributes:
        name: of the model in the LightningModule, which its parameters' names begin with.
        architecture: class of transformers.
        config: JSON.
        generation_config: JSON, or ``None``.
        source: name or directory that the model was loaded from, where its tokenizer is; may be empty.
        adapters: configs of peft by the adapters' names, JSON.
        active: names of the adapters that are in use.
        untied: names of weights that the config ties, and that this model holds apart (a head of the user's own).
    """

    name: str
    architecture: str
    config: str
    generation_config: str | None
    source: str
    adapters: Mapping[str, str] = field(default_factory=dict)
    active: tuple[str, ...] = ()
    untied: tuple[str, ...] = ()

    def build(self, classes: Classes | None = None) -> PreTrainedModel:
        """Builds the model without weights, on the meta device.

        Args:
            classes: of a model that transformers does not have.

        Raises:
            ValueError: if there are none, and the class is not one of the installed transformers.
        """
        values = json.loads(self.config)
        kind = getattr(transformers, self.architecture, None) if classes is None else classes.model
        if kind is None:
            raise ValueError(
                f"{self.architecture} is not in transformers {transformers.__version__} (a class of your own, or of "
                "another version); write it with the HuggingFaceExport callback at the end of a run"
            )
        model_type = values.pop("model_type")
        config = AutoConfig.for_model(model_type, **values) if classes is None else classes.config(**values)
        with torch.device("meta"):
            model = kind(config)
        untie(model, self.untied)
        if self.generation_config is not None:
            model.generation_config = GenerationConfig.from_dict(json.loads(self.generation_config))
        return model

    @staticmethod
    def of_directory(directory: Path) -> "Description":
        """Describes a model that lies in Hugging Face's format, for checkpoints that say nothing.

        Raises:
            ValueError: if there is no ``config.json`` with an architecture.
        """
        path = directory / "config.json"
        config = json.loads(path.read_text()) if path.is_file() else {}
        if not config.get("architectures"):
            raise ValueError(f"{directory} has no config.json that names the model's class in 'architectures'")
        generation = directory / "generation_config.json"
        return Description(
            name="",
            architecture=config["architectures"][0],
            config=json.dumps(config),
            generation_config=generation.read_text() if generation.is_file() else None,
            source=str(directory),
        )


def describe_models(module: nn.Module) -> list[dict[str, Any]]:
    """Describes the outermost Hugging Face models of ``module``, for an entry of a checkpoint."""
    found: dict[str, PreTrainedModel] = {}
    around: dict[str, Any] = {}
    for name, child in module.named_modules():
        if isinstance(child, PreTrainedModel) and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = child
        elif not isinstance(child, PreTrainedModel) and hasattr(child, "save_pretrained"):
            around[name] = child
    holders = {name: next((a for n, a in around.items() if name.startswith(f"{n}.")), None) for name in found}
    return [asdict(_describe(name, model, holders[name])) for name, model in found.items()]


def descriptions_of(checkpoint: Mapping[str, Any]) -> list[Description]:
    """Reads what :func:`describe_models` put into a checkpoint."""
    return [Description(**entry) for entry in checkpoint.get(DESCRIPTIONS, [])]


def _describe(name: str, model: PreTrainedModel, holder: nn.Module | None) -> Description:
    """Describe ``model``, whose adapters may lie in its layers, or in the ``holder`` around it (prompts)."""
    configs = getattr(model, "peft_config", None) or getattr(holder, "peft_config", {})
    generation = model.generation_config if model.can_generate() else None
    return Description(
        name=name,
        architecture=class_names(model)[0],
        config=model.config.to_json_string(use_diff=False),
        generation_config=None if generation is None else generation.to_json_string(),
        source=source_of(model.config),
        adapters={n: json.dumps(c.to_dict(), default=list) for n, c in configs.items()},
        active=tuple(_active(model)),
        untied=tuple(sorted(untied_names(model))),
    )


def _active(model: nn.Module) -> list[str]:
    layers: list[Any] = [module for module in model.modules() if is_wrapper(module)]
    layer = next((layer for layer in layers if hasattr(layer, "active_adapters")), None)
    return [] if layer is None else list(layer.active_adapters)
