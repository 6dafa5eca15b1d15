"""Quantized weights: four bits of bitsandbytes are right, and what becomes floating-point numbers as it is read; all
others are refused before training.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_automodel.modules.four_bit import describe, form_of, four_bit_layers, is_four_bit, put_in

_WAY_OUT = (
    "quantize by BitsAndBytesConfig(load_in_4bit=True), load it without quantization_config, in bfloat16 (frozen "
    "weights take 2 bytes divided by tp x dp_shard), read files of MXFP4 or FP8 with dequantize=True in "
    "quantization_config, or call model.dequantize() before"
)


def refuse_quantized(model: nn.Module) -> None:
    """Check that ``model`` holds plain weights, or such of four bits that are kept in rows of bytes.

    Args:
        model: perhaps on the meta device.

    Raises:
        ValueError: naming how it is quantized, and the way out.
    """
    if not getattr(model, "is_quantized", False) or _has_four_bit(model):
        return
    kind = _kind_of(model)
    kind = "bitsandbytes, eight bits" if kind == "bitsandbytes" else kind
    raise ValueError(
        f"{type(model).__name__} is quantized ({kind}), and its packed weights would be cut or copied among ranks in "
        f"ways that were not compared with one process; {_WAY_OUT}"
    )


def refuse_four_bit(model: nn.Module) -> None:
    """Check that ``model`` holds no weights of four bits.

    Args:
        model: perhaps on the meta device.

    Raises:
        ValueError: naming the way out.
    """
    if getattr(model, "is_quantized", False) and _has_four_bit(model):
        raise ValueError(
            f"{type(model).__name__} is quantized (bitsandbytes, four bits), and Megatron-FSDP keeps parameters that "
            "are floating-point numbers; use FSDP2TPStrategy or DDPStrategy, or load it without quantization_config"
        )


def _has_four_bit(model: nn.Module) -> bool:
    return _kind_of(model) == "bitsandbytes" and any(is_four_bit(module) for module in model.modules())


def _kind_of(model: nn.Module) -> Any:
    method: Any = getattr(model, "quantization_method", None)
    return getattr(method, "value", method)


def becomes_plain(quantizer: Any) -> bool:
    """Tell whether weights are made floating-point numbers as they are read (MXFP4 of GPT-OSS, FP8 of DeepSeek-V3).

    Args:
        quantizer: transformers' for a model, or ``None``.
    """
    return bool(getattr(getattr(quantizer, "quantization_config", None), "dequantize", False))


def set_four_bit(set_parameter: Any, model: PreTrainedModel, name: str, value: Tensor) -> bool:
    """Give a layer of four bits its bytes. Tells whether ``name`` is the weight of one.

    Args:
        set_parameter: takes ``model``, the name of a parameter and its whole value.
        model: whose layers may be sharded.
        name: of a parameter.
        value: of bitsandbytes, quantized.
    """
    owner = name.rpartition(".")[0]
    module = model.get_submodule(owner)
    form = form_of(module)
    if form is None or not name.endswith(".weight"):
        return False
    for short, part in put_in(module, form, value).items():
        set_parameter(model, f"{owner}.{short}", part)
    describe(module, form_of(module) or form)
    return True


def share_forms(model: nn.Module, send: Callable[[Any], Any]) -> None:
    """Give all ranks what the one that read four-bit weights remembers beside their bytes.

    Args:
        model: the same on all ranks.
        send: returns on every rank what the one that read passes.
    """
    if any(True for _ in four_bit_layers(model)):
        forms = send({name: form for name, _, form in four_bit_layers(model)})
        for name, form in forms.items():
            describe(model.get_submodule(name), form)
