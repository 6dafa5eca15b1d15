"""Refuses quantized weights, which this package has not been measured with: packed blocks must not be cut anywhere."""

from typing import Any

from torch import nn


def refuse_quantized(model: nn.Module) -> None:
    """Check that ``model`` holds plain weights.

    Raises:
        ValueError: naming how it is quantized, and the way out.
    """
    if not getattr(model, "is_quantized", False):
        return
    method: Any = getattr(model, "quantization_method", None)
    kind = getattr(method, "value", method)
    raise ValueError(
        f"{type(model).__name__} is quantized ({kind}), and its packed weights would be cut or copied among ranks in "
        "ways that were not compared with one process; load it without quantization_config, in bfloat16 (frozen "
        "weights take 2 bytes divided by tp x dp_shard), or call model.dequantize() before"
    )
