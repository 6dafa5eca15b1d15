"""Refuses callbacks that need whole tensors, where a module's are sharded."""

from collections.abc import Iterable
from typing import Any

from lightning.pytorch.callbacks import ModelPruning
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_automodel.distributed.uneven_shards import PARTITION


def check_callbacks(callbacks: Iterable[Any], module: nn.Module) -> None:
    """Check that no callback chooses elements of a sharded parameter of ``module`` by all of its elements.

    Raises:
        ValueError: naming the callback, a parameter, and what to use instead.
    """
    pruning = next((callback for callback in callbacks if isinstance(callback, ModelPruning)), None)
    if pruning is None:
        return
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor) or hasattr(parameter, PARTITION):
            raise ValueError(
                f"{type(pruning).__name__} chooses what it prunes by all elements of a tensor, and {name} is sharded; "
                "use DDPStrategy, where every process holds whole tensors, or prune before training"
            )
