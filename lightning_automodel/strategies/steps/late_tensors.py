"""Refuses to train what is no parameter of the parallel module, which changes nothing, or each rank for itself.

::

                           GPU 0              GPU 1
    the module's           mean of 0 and 1    mean of 0 and 1    reduced by FSDP2, DDP or Megatron-FSDP
    made after it          gradient of 0      gradient of 1      two layers, after the first step
    collected before it    none               none               parallel parameters are others
"""

from collections.abc import Container, Iterable

from torch import Tensor, nn
from torch.optim import Optimizer


class LateTensors:
    """Looks at what optimizers have, whenever it has become more or less, or other tensors."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}

    def have_changed(self, optimizer: Optimizer) -> bool:
        """Tell whether ``optimizer`` has other tensors than when it was asked about last."""
        held = hash(tuple(id(tensor) for group in optimizer.param_groups for tensor in group["params"]))
        before, self._seen[id(optimizer)] = self._seen.get(id(optimizer)), held
        return held != before


def refuse_late_tensors(optimizers: Iterable[Optimizer], module: nn.Module, reduced: Container[Tensor]) -> None:
    """Refuse tensors that an optimizer trains, and whose gradients nobody reduces.

    Args:
        optimizers: whose tensors are looked at.
        module: its names are those of the message.
        reduced: tensors whose gradients become those of all samples.

    Raises:
        ValueError: naming the tensor, and where to make it instead.
    """
    for optimizer in optimizers:
        for tensor in (tensor for group in optimizer.param_groups for tensor in group["params"]):
            if tensor.requires_grad and tensor not in reduced:
                raise ValueError(
                    f"{type(optimizer).__name__} trains {_describe(tensor, module)} that is not among the parameters "
                    "of the parallel module: its gradient would be that of each rank's own samples, or none at all. "
                    "Make what trains in __init__, setup or configure_model, as an nn.Parameter of an nn.Module that "
                    "is an attribute (not later, not in a list, and no buffer); and give the optimizer what "
                    "self.parameters() has in configure_optimizers (not earlier)"
                )


def _describe(tensor: Tensor, module: nn.Module) -> str:
    named = [*module.named_parameters(), *module.named_buffers()]
    name = next((name for name, held in named if held is tensor), None)
    return f"{name}, a tensor" if name else f"a tensor of shape {list(tensor.shape)}"
