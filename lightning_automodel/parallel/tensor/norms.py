"""Norms over features, or over rows of a matrix, of which each rank has a part: squares are summed over the ranks."""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from lightning_automodel._compat.torch.pytree import tree_map_only
from lightning_automodel.distributed.collectives import copy_in, reduce_out
from lightning_automodel.plans.linearity import mark


def install_norm(module: nn.Module, group: ProcessGroup, name: str) -> None:
    """Normalizes features [..., width / tp] by the mean square of all ``width`` of them."""
    if not isinstance(module, nn.RMSNorm):
        raise ValueError(f"norm_across_heads is for torch.nn.RMSNorm, but {name} is a {type(module).__name__}")

    def forward(self: nn.RMSNorm, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = copy_in(reduce_out(wide.square().sum(-1, keepdim=True), group), group)
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        normalized = wide * torch.rsqrt(squares / self.normalized_shape[0] + eps)
        return (normalized if self.weight is None else normalized * self.weight).to(x.dtype)

    module.forward = MethodType(forward, module)  # type: ignore[method-assign]


def install_row_norm(module: nn.Module, group: ProcessGroup) -> None:
    """Sums the squares of rows, of which each rank has its columns, before the root is taken."""

    def get_weight_norm(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        with torch.no_grad():  # DoRA takes the norm for a constant
            args, kwargs = tree_map_only(Tensor, _of_rank, (args, kwargs))
            norm = type(self).get_weight_norm(self, *args, **kwargs)
            if isinstance(norm, DTensor):  # outside of a forward pass, as merging asks for it: of whole rows
                return norm
            return reduce_out(norm.float().square(), group).sqrt().to(norm.dtype)

    module.get_weight_norm = MethodType(get_weight_norm, module)  # type: ignore[assignment]


def _of_rank(columns: Tensor) -> Tensor:
    """Return ``columns`` as a value of this rank's own: what is made of them here is no term of a sum of features."""
    columns = columns.detach()
    mark(columns, None)
    return columns
