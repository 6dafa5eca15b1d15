"""How attention modules count their heads, and what they are handed for each."""

from collections.abc import Mapping

from torch import nn

from lightning_automodel.modules.reachable_code import names_in_code

KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_n_heads")
HEADS = ("heads", "num_heads", "n_heads", "n_head", "num_attention_heads", "num_attn_heads", *KEY_VALUE_HEADS)
"""Attributes of attention modules that count heads, where these cannot tell the number from the width of what comes."""

_SIZES_OF_HEADS = ("head_dim", "head_size")
"""Attributes of attention modules that count no heads: what comes in is cut by the size of one."""

BIASES_OF_HEADS = {"alibi", "position_bias", "relative_position_bias", "rel_pos", "rel_2d_pos"}
"""Arguments of attention modules that hold numbers of all heads, in the last dimension but two."""


def counts_of(module: nn.Module) -> dict[str, int]:
    """Reads the attributes of a module that count heads."""
    found = {attribute: getattr(module, attribute, None) for attribute in HEADS}
    return {attribute: n for attribute, n in found.items() if isinstance(n, int) and not isinstance(n, bool)}


def count_in_config(module: nn.Module) -> str:
    """Name the number of heads that the code of a module reads in its config, where no attribute has it; or nothing."""
    config, used = getattr(module, "config", None), names_in_code(module)
    read = [name for name in HEADS if name in used and isinstance(getattr(config, name, None), int)]
    return read[0] if read and not hasattr(module, read[0]) else ""


def heads_of(counts: Mapping[str, int]) -> int | None:
    """Return the number of query heads among attributes that count heads; ``None`` where none of them does."""
    return next((count for name, count in counts.items() if name in HEADS and name not in KEY_VALUE_HEADS), None)


def computes_heads(module: nn.Module) -> bool:
    """Tell by its attributes whether a module counts heads, or knows the size of one."""
    return bool(counts_of(module)) or any(isinstance(getattr(module, size, None), int) for size in _SIZES_OF_HEADS)
