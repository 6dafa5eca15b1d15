"""Tiny models with adapters of peft, whose values are drawn anew so that no factor is zero."""

from pathlib import Path
from typing import Any

import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from lightning_automodel.checkpointing.files.reading import read_checkpoint
from lightning_automodel.checkpointing.files.storage import Location
from lightning_automodel.checkpointing.states import clean_name
from lightning_automodel.config import FSDP2Config
from tests.support.comparison import Schedule, compare
from tests.support.families import tiny_model

EXPERTS = ("gate_up_proj", "down_proj")
METHODS: dict[str, dict[str, Any]] = {
    "all-linear": {"target_modules": "all-linear"},
    "dropout": {"target_modules": "all-linear", "lora_dropout": 0.3},
    "rslora": {"target_modules": "all-linear", "use_rslora": True},
    "dora": {"target_modules": "all-linear", "use_dora": True},
    "bias": {"target_modules": "all-linear", "bias": "all", "lora_bias": True},
    "ends": {"target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    "saved": {"target_modules": ["q_proj", "down_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    "saved mlp": {"target_modules": ["q_proj", "o_proj"], "modules_to_save": ["mlp"]},
    "saved block": {"target_modules": ["q_proj"], "modules_to_save": ["layers.1"]},
    "experts": {"target_modules": "all-linear", "target_parameters": [f"experts.{name}" for name in EXPERTS]},
    "stacked": {"target_modules": ["q_proj"], "target_parameters": [f"experts.{name}" for name in EXPERTS]},
    "table": {"target_modules": ["q_proj"], "target_parameters": ["embed_tokens.weight", "o_proj.weight"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [3, 5]},
    "ia3": {"target_modules": ["k_proj", "q_proj", "o_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
}
"""Fields of the config of an adapter, by name."""


def adapted(family: str, method: str, **changes: Any) -> PeftModel:
    """A family's tiny model with the adapters of a method."""
    return with_adapter(tiny_model(family, **changes), method)


def with_adapter(base: PreTrainedModel, method: str) -> PeftModel:
    """``base`` with the adapters of a method, equal on all ranks."""
    kind = IA3Config if method == "ia3" else LoraConfig
    rank = {} if method == "ia3" else {"r": 3}
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = get_peft_model(base, kind(**METHODS[method], **rank))  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model


def adapter_error(
    family: str,
    method: str,
    sizes: dict[str, int],
    schedule: Schedule,
    config: FSDP2Config | None = None,
    **changes: Any,
) -> tuple[float, str]:
    """Runs on each rank: the largest error of a mesh against one process, and what has it."""
    world = torch.distributed.get_world_size()
    build = lambda: adapted(family, method, **changes)  # noqa: E731
    return compare(build, sizes, world, schedule, config).largest


def stored_names(path: Path) -> set[str]:
    """Names of weights that a checkpoint holds."""
    return {clean_name(name) for name in read_checkpoint(Location.of(path))["state_dict"]}
