"""Keeps a replica of the model on every rank: the last stage under DDP, whose wrapper then averages gradients."""

from dataclasses import dataclass

import torch
from torch import nn

from lightning_automodel.distributed.logs import log
from lightning_automodel.loading.initialize import broadcast_weights, materialize
from lightning_automodel.mesh import Axes
from lightning_automodel.modules.structure import class_names
from lightning_automodel.parallel.precision.compute_dtype import install_compute_dtype
from lightning_automodel.plans import Layout, Plan


@dataclass(frozen=True)
class Replication:
    """The stage, for a run.

    Attributes:
        axes: of the mesh; no tp.
        device: of weights that are drawn here, because no file was read.
        dtype: of compute; ``None``: that of the parameters.
    """

    axes: Axes
    device: torch.device
    dtype: torch.dtype | None

    def sums_gradients(self, model: nn.Module) -> bool:
        """Tell that nothing is left to sum: nothing is split, so no gradient is partial."""
        return True

    def apply(self, model: nn.Module, plan: Plan | None, layout: Layout | None) -> None:
        """Draw the weights of a model that is still on the meta device, and compute in the narrower dtype."""
        if any(parameter.is_meta for parameter in model.parameters()):
            materialize(model, self.device)
            broadcast_weights(model, self.axes.tp)
        if self.dtype is not None:
            install_compute_dtype(model, self.dtype)
        log(f"{class_names(model)[0]}: a replica on each of {self.axes.data.size()} ranks, compute in {self.dtype}")
