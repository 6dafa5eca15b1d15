"""Methods of peft that train something beside the model: what they need of it may lie in shards, or be split."""

from typing import Any

from torch import nn

_PREFIXES = ("PREFIX_TUNING", "CARTRIDGE")
"""Kinds that stand before each layer's keys, and not before what enters the model."""

_BANKS = ("TINYLORA", "UNILORA", "VBLORA")
"""Kinds whose vectors lie beside all layers, and under a second name in each of these."""


def refuse_shadows(root: nn.Module) -> None:
    """Refuse a second network that a hook in front of the model calls.

    Args:
        root: a LightningModule.

    Raises:
        ValueError: naming the method, and what to use.
    """
    for config in _configs(root):
        if config.peft_type == "SHADOW":
            raise ValueError(
                f"{type(config).__name__} of peft: a hook in front of the model calls its embedding and a second "
                "network, before the pass begins in which a strategy serves them; use LoRA, or without tp a loop of "
                "your own: parallelize(get_peft_model(base, config), mesh)"
            )


def refuse_prompts(root: nn.Module, tp: int) -> None:
    """Refuse those whose prompt would be computed from parts of what it needs, or that all layers share.

    Args:
        root: a LightningModule, or a model.
        tp: of the mesh; prefixes are right on whole heads.

    Raises:
        ValueError: naming the method, and what to use.
    """
    for config in _configs(root):
        name, kind = type(config).__name__, config.peft_type
        if kind == "CPT":
            raise ValueError(
                f"{name} of peft: its forward pass writes into the weight that it trains, and a hook changes that "
                "weight's gradient, of both of which ranks hold shards; use LoRA, or DDPStrategy"
            )
        if kind in _BANKS:
            raise ValueError(
                f"{name} of peft: the vectors that it trains lie beside all layers, and what these shard would be "
                "copies of them; use LoRA, DDPStrategy, or without tp a loop of your own: "
                "parallelize(get_peft_model(base, config), mesh)"
            )
        if tp > 1 and kind in _PREFIXES:
            raise ValueError(
                f"{name} of peft with tp={tp}: it gives each layer keys and values of whole heads, of which a rank has "
                "some; use LoRA, prompt tuning, or tp=1"
            )


def _configs(root: nn.Module) -> list[Any]:
    found = [config for module in root.modules() for config in (getattr(module, "peft_config", None) or {}).values()]
    return [config for config in found if hasattr(config, "peft_type")]
