"""Lays gradients that autograd gives shards by themselves, from a penalty on them, as these lie.

DTensor (2.13) leaves whole what has fewer rows than ranks, while FSDP2 adds its sums of shards to that, or autograd
that to the sums, whichever comes first in a backward pass.
"""

from collections.abc import Iterable
from functools import partial

from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from lightning_automodel.modules.forward import SharedByCopies


def lay_gradients(model: nn.Module) -> None:
    """Lay what autograd gives shards of ``model`` that FSDP2 has made."""
    if short := [p for p in model.parameters() if isinstance(p, DTensor) and _is_short(p)]:
        model.register_forward_pre_hook(_Watches(short))


class _Watches(SharedByCopies):
    """Watches where autograd adds up gradients: a forward pre-hook."""

    def __init__(self, parameters: Iterable[DTensor]) -> None:
        self._nodes: dict[DTensor, Node | None] = dict.fromkeys(parameters)

    def __call__(self, module: nn.Module, args: tuple) -> None:
        """Look again: ``module.to`` and the like let autograd forget where it was watched."""
        for parameter, watched in self._nodes.items():
            if parameter.requires_grad and (node := get_gradient_edge(parameter).node) is not watched:
                node.register_prehook(partial(_lay, parameter.placements))
                self._nodes[parameter] = node  # lives as long as it is held


def _is_short(parameter: DTensor) -> bool:
    dims = (getattr(placement, "dim", None) for placement in parameter.placements)
    return any(d is not None and parameter.shape[d] < parameter.device_mesh.size(i) for i, d in enumerate(dims))


def _lay(placements: tuple[Placement, ...], gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    (gradient,) = gradients
    if not isinstance(gradient, DTensor) or gradient.placements == placements:
        return None
    return (gradient.redistribute(placements=placements),)
