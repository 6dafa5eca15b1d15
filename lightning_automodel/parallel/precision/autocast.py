"""``torch.autocast`` around the forward pass of a model, and a residual stream in float32 under it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_automodel.distributed.logs import log
from lightning_automodel.modules.forward import wrap_forward
from lightning_automodel.modules.structure import class_names, find_input_embedding


def install_autocast(model: nn.Module, dtype: torch.dtype, device_type: str) -> None:
    """Runs ``model`` under ``torch.autocast(device_type, dtype)`` from now on: matrix products compute in ``dtype``."""

    def around(module: nn.Module, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        with torch.autocast(device_type, dtype):
            return forward(*args, **kwargs)

    wrap_forward(model, around)
    log(f"{class_names(model)[0]}: the forward pass runs under autocast to {dtype}")


def widen_stream(model: nn.Module, dtype: torch.dtype) -> None:
    """Make embeddings, and so every residual sum after them, come out in ``dtype``, unless somebody casts.

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
    embedding.register_forward_hook(lambda module, args, output: _widened(output, dtype))


def _widened(output: Any, dtype: torch.dtype) -> Any:
    return output.to(dtype) if isinstance(output, Tensor) and output.is_floating_point() else output
