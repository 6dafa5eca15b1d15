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
    for name, count in (("num_attention_heads", heads), ("num_key_value_heads", kv_heads)):
        if count % tp:
            fitting = [str(n) for n in range(1, count + 1) if heads % n == 0 and kv_heads % n == 0]
            raise ValueError(
                f"tp={tp} does not divide {name}={count} of {type(model).__name__}; use one of {', '.join(fitting)}"
            )
