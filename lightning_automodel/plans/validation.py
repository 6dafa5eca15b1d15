"""Checks that the tensor-parallel size fits a model, before anything is split."""

from torch import nn

from lightning_automodel.blocks import text_config


def validate_tp(model: nn.Module, tp: int) -> None:
    """Checks that ``tp`` divides the attention heads and the key/value heads of the language model.

    Raises:
        ValueError: naming the count that ``tp`` does not divide and the sizes that fit.
    """
    config = text_config(model)
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        return
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    fitting = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
    if tp not in fitting:
        raise ValueError(
            f"tp={tp} does not fit {type(model).__name__} with num_attention_heads={heads} and "
            f"num_key_value_heads={kv_heads}: tp divides the heads, and divides the key/value heads or is a multiple "
            f"of them; use one of {', '.join(map(str, fitting))}"
        )
