"""Finds what a LightningModule holds that must be made parallel: Hugging Face models, and layers beside them."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from lightning_automodel._compat import OptimizedModule
from lightning_automodel.blocks import CONTAINERS
from lightning_automodel.logs import warn_once


@dataclass(frozen=True)
class Unit:
    """A module that is called as a whole, and is sharded as one FSDP2 root."""

    name: str
    module: nn.Module

    @property
    def is_sharded(self) -> bool:
        """Made parallel already: by ``from_pretrained``, or by an earlier call of the trainer."""
        return isinstance(self.module, FSDPModule)


def find_units(root: nn.Module) -> list[Unit]:
    """The units below a LightningModule, in the order of registration.

    Raises:
        ValueError: for a parameter that no unit holds, since nothing would tell when to gather it.
    """
    return list(_units(root, ""))


def unwrap_compiled(root: nn.Module) -> None:
    """Replaces children that ``torch.compile`` wrapped by what they wrap: the wrapper hides the model and its names."""
    for parent in list(root.modules()):
        for name, child in parent.named_children():
            if isinstance(child, OptimizedModule):
                warn_once(
                    f"{name} was passed through torch.compile before it was made parallel; it runs uncompiled, "
                    "because a compiled graph of the whole model cannot gather its shards block by block"
                )
                setattr(parent, name, child._orig_mod)


def _units(module: nn.Module, name: str) -> Iterator[Unit]:
    if isinstance(module, PreTrainedModel | FSDPModule):
        yield Unit(name, module)
        return
    is_layer = name and not isinstance(module, CONTAINERS) and not _is_parameter_container(module)
    if is_layer and not any(isinstance(m, PreTrainedModel) for m in module.modules()):
        if next(module.parameters(), None) is not None:
            yield Unit(name, module)
        return
    for parameter_name, _ in module.named_parameters(recurse=False):
        raise ValueError(
            f"the parameter {f'{name}.{parameter_name}' if name else parameter_name} belongs to no layer whose forward "
            "is called, so it cannot be sharded; move it into an nn.Module whose forward uses it"
        )
    for child_name, child in module.named_children():
        yield from _units(child, f"{name}.{child_name}" if name else child_name)


def _is_parameter_container(module: nn.Module) -> bool:
    return isinstance(module, nn.ParameterList | nn.ParameterDict)
