"""transformers' conversions of weights: what they take, and how they fail."""

from typing import Any

from torch import Tensor
from transformers.core_model_loading import SkipParameters as ConversionFailed

__all__ = ["ConversionFailed", "conversion_inputs", "forget_conversion_error", "quantizes"]


def conversion_inputs(conversion: Any) -> dict[str, list[Tensor]]:
    """Takes what was collected for a ``WeightConverter``, by the pattern of the name in the files."""
    return conversion.materialize_tensors()


def quantizes(conversion: Any) -> bool:
    """Tell whether a quantizer takes what the conversion gives."""
    return conversion.quantization_operation is not None


def forget_conversion_error(info: Any, name: str) -> None:
    """Drop the error of a conversion, which transformers keeps and reports when all is read."""
    info.conversion_errors.pop(name, None)
