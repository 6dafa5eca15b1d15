"""Methods of peft that train a prompt beside the model: what they need of it may lie in shards, or be split."""

from typing import Any

from torch import nn

_PREFIXES = ("PREFIX_TUNING", "CARTRIDGE")
"""Kinds that stand before each layer's keys, and not before what enters the model."""


def refuse_prompts(root: nn.Module, tp: int) -> None:
    """Refuse those whose prompt would be computed from parts of what it needs.

    Args:
        root: a LightningModule, or a model.
        tp: of the mesh; prefixes are right on whole heads.

    Raises:
        ValueError: naming the method, and what to use.
    """
    for config in _prompts(root):
        name, kind = type(config).__name__, config.peft_type
        if kind == "CPT":
            raise ValueError(
                f"{name} of peft: its forward pass writes into the weight that it trains, and a hook changes that "
                "weight's gradient, of both of which ranks hold shards; use LoRA, or DDPStrategy"
            )
        if tp > 1 and kind in _PREFIXES:
            raise ValueError(
                f"{name} of peft with tp={tp}: it gives each layer keys and values of whole heads, of which a rank has "
                "some; use LoRA, prompt tuning, or tp=1"
            )


def _prompts(root: nn.Module) -> list[Any]:
    found = [config for module in root.modules() for config in (getattr(module, "peft_config", None) or {}).values()]
    return [config for config in found if getattr(config, "is_prompt_learning", False)]
