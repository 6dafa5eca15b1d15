"""``torch.autocast`` around the forward pass of a model, and a residual stream in float32 under it."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from lightning_automodel.distributed.logs import log
from lightning_automodel.modules.forward import wrap_forward
from lightning_automodel.modules.structure import class_names, find_input_embedding
from lightning_automodel.modules.wrappers import unwrapped


def install_autocast(model: nn.Module, dtype: torch.dtype, device_type: str) -> None:
    """Runs ``model`` under ``torch.autocast(device_type, dtype)`` from now on: matrix products compute in ``dtype``."""

    def around(module: nn.Module, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        with torch.autocast(device_type, dtype):
            return forward(*args, **kwargs)

    wrap_forward(model, around)
    log(f"{class_names(model)[0]}: the forward pass runs under autocast to {dtype}")


def widen_stream(model: nn.Module, dtype: torch.dtype) -> None:
    """Make embeddings, and so every residual sum after them, come out in ``dtype``, unless somebody casts.

    Encoder and decoder may each have a table of their own, of one weight, beside the one that the model names. Layer
    norms compute in the dtype of the stream, as autocast has it on CUDA; on CPU it leaves them, and torch mixes none.

    Raises:
        ValueError: if ``model`` does not say which module its embedding is.
    """
    if not isinstance(model, PreTrainedModel):
        return
    embedding = find_input_embedding(model)
    if embedding is None:
        raise ValueError(
            f"mp_policy.output_dtype={dtype} with autocast_dtype widens what the embedding returns, and "
            f"{class_names(model)[0]} names none (get_input_embeddings); leave output_dtype out"
        )
    for table in {id(table): table for table in (embedding, *_tables_of_parts(model))}.values():
        table.register_forward_hook(lambda module, args, output: _widened(output, dtype))
    for module in model.modules():
        if type(module) is nn.LayerNorm:
            wrap_forward(module, _in_dtype_of_input)


def _in_dtype_of_input(module: nn.Module, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    value, norm = (*args, *kwargs.values())[0], cast(nn.LayerNorm, module)
    if not isinstance(norm.weight, Tensor) or norm.weight.dtype.itemsize >= value.dtype.itemsize:
        return forward(*args, **kwargs)
    bias = norm.bias.to(value.dtype) if isinstance(norm.bias, Tensor) else None
    return functional.layer_norm(value, norm.normalized_shape, norm.weight.to(value.dtype), bias, norm.eps)


def _tables_of_parts(model: PreTrainedModel) -> list[nn.Module]:
    parts = (part for part in model.modules() if isinstance(part, PreTrainedModel))
    tables = [table for part in parts if (table := find_input_embedding(part)) is not None]
    return [table for table in tables if isinstance(unwrapped(table), nn.Embedding)]  # not those of pixels


def _widened(output: Any, dtype: torch.dtype) -> Any:
    return output.to(dtype) if isinstance(output, Tensor) and output.is_floating_point() else output
