"""Which parameters train where Lightning's callbacks of fine-tuning choose them: a run that resumes goes on with those.

The callbacks freeze layers when a run is set up, thaw them when an epoch begins, and keep the groups of the optimizer
in a checkpoint; whether a parameter trains, Lightning keeps nowhere.
"""

from collections.abc import Iterable
from typing import Any

from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn

from lightning_automodel.checkpointing.states import clean_name

TRAINED = "trained_parameters"
"""Entry of a checkpoint of a run with such a callback."""


def trained_parameters(module: nn.Module, callbacks: Iterable[Any]) -> dict[str, list[str]]:
    """Make the entry of a checkpoint; none where no callback chooses."""
    if not any(isinstance(callback, BaseFinetuning) for callback in callbacks):
        return {}
    return {TRAINED: [clean_name(name) for name, parameter in module.named_parameters() if parameter.requires_grad]}


def restore_trained(module: nn.Module, callbacks: Iterable[Any], names: Iterable[str] | None) -> None:
    """Let the parameters of the entry train, and no others."""
    if names is None or not any(isinstance(callback, BaseFinetuning) for callback in callbacks):
        return
    trained = set(names)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(clean_name(name) in trained)
