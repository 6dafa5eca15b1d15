"""AdaLoRA's model, which reads its factors past the forward pass: of whole ones, beside a model that is sharded.

It adds a penalty on them to the loss, and gives each of them its share of the ranks (``update_and_allocate``).
"""

from collections.abc import Generator
from contextlib import contextmanager
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_automodel._compat.torch.modules import own_children
from lightning_automodel.distributed.shards import copy_from_whole
from lightning_automodel.distributed.uneven_shards import PARTITION

_MODEL = "model"
"""Where a tuner of peft holds the model whose layers it adapts."""


def install_whole_factors(root: nn.Module) -> None:
    """Let AdaLoRA's models below ``root`` call the model that they hold, and read whole factors.

    peft calls its forward alone, past the hooks that gather, and reads what are shards behind it.
    """
    for module in root.modules():
        if hasattr(type(module), "update_and_allocate") and _MODEL in own_children(module):
            module.forward = MethodType(_forward, module)
            module.update_and_allocate = MethodType(_update_and_allocate, module)  # type: ignore[assignment]


def _forward(tuner: Any, *args: Any, **kwargs: Any) -> Any:
    # Before the model is called, behind which some are whole until the backward pass. The penalty is the same on all
    # ranks, and so is its gradient, of which each keeps its shard; FSDP2 adds that of the pass.
    factors = {name: _whole(name, p) for name, p in _factors(tuner).items()}
    outputs = tuner.model(*args, **kwargs)
    with _in_place_of_model(tuner, forward=lambda: outputs, named_parameters=factors.items):
        return type(tuner).forward(tuner)


def _update_and_allocate(tuner: Any, global_step: int) -> None:
    """Measure factors, and set to zero those that go without. Collective."""
    factors = _factors(tuner)
    with torch.no_grad():
        whole = {name: nn.Parameter(_whole(name, p), p.requires_grad) for name, p in factors.items()}
        for name, value in whole.items():
            gradient = factors[name].grad
            value.grad = None if gradient is None else _whole(name, gradient)
        with _in_place_of_model(tuner, named_parameters=whole.items):
            type(tuner).update_and_allocate(tuner, global_step)
        for name, value in whole.items():
            copy_from_whole(factors[name], value)


def _factors(tuner: Any) -> dict[str, nn.Parameter]:
    return {name: p for name, p in tuner.model.named_parameters() if ".lora_" in name}


@contextmanager
def _in_place_of_model(tuner: Any, **attributes: Any) -> Generator[None, None, None]:
    children, model = own_children(tuner), tuner.model
    children[_MODEL] = SimpleNamespace(**attributes)  # type: ignore[assignment]
    try:
        yield
    finally:
        children[_MODEL] = model


def _whole(name: str, factor: Tensor) -> Tensor:
    if hasattr(factor, PARTITION):
        raise ValueError(
            f"AdaLoRA reads whole factors beside the forward pass (a penalty on them; update_and_allocate), and "
            f"Megatron-FSDP shards {name} by rows there; use FSDP2TPStrategy or DDPStrategy, or LoRA"
        )
    return factor.full_tensor() if isinstance(factor, DTensor) else factor
