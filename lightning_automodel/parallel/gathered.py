"""Looks after what an FSDP2 model holds gathered behind a forward pass: copies, which nobody is to change."""

from typing import Any

from torch import nn

from lightning_automodel._compat.fsdp2 import disagreeing_parameters, fsdp_units, is_kept_gathered
from lightning_automodel.modules.structure import class_names
from lightning_automodel.parallel.hidden_outputs import awaits_backward


def watch_gathered(model: nn.Module) -> None:
    """Free an FSDP2 root where no backward pass follows its forward pass, and refuse copies that are stale."""
    model.register_forward_pre_hook(_check_trained, prepend=True)
    model.register_forward_hook(_free_without_backward)


def _check_trained(model: nn.Module, args: tuple) -> None:
    """Check that what is gathered trains what is to be trained: a forward pre-hook."""
    if next(disagreeing_parameters(model), None) is not None:
        raise ValueError(
            f"requires_grad of parameters of {class_names(model)[0]} changed between a forward pass and its backward "
            "pass, while their copies were gathered; change it before the forward pass, or behind the backward pass, "
            "and call a model whose loss is not used within torch.no_grad()"
        )


def _free_without_backward(model: nn.Module, args: tuple, output: Any) -> None:
    """Free a model that was called to be read (a teacher, a model that others train against): a forward hook.

    What is gathered is a copy: it would not notice that ``requires_grad`` of a parameter changes before the next
    forward pass, and changes of its values by hand would be lost.
    """
    if not awaits_backward(output):
        for unit in fsdp_units(model):
            if not is_kept_gathered(unit):
                unit.reshard()
