"""Puts whole tensors in the place of shards that have their values, while the others are initialized."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_automodel._compat.torch.pytree import tree_map_only
from lightning_automodel._compat.torch.tensors import wrapper_tensor
from lightning_automodel.distributed.shards import gather_on_rank_zero
from lightning_automodel.loading.broadcast import broadcast

aten: Any = torch.ops.aten


class StandIn(Tensor):
    """A shard as a whole plain tensor, gathered when an operation looks at its values, which is rare.

    Initialization is written for plain tensors. It makes others of the same shape, for which no value is needed; what
    it writes into this one (by an operation that does not ask first whether there is a value) counts, as on one device.
    Collective with the first look, so that all ranks must initialize in the same order.
    """

    gathered: "Gathered"

    @staticmethod
    def __new__(cls, gathered: "Gathered") -> "StandIn":
        """Makes one of what can be gathered."""
        shard = gathered.shard
        new = wrapper_tensor(
            cls, shard.shape, dtype=shard.dtype, device=gathered.device, requires_grad=shard.requires_grad
        )
        new.gathered = gathered
        return new

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func in (aten.detach.default, aten.alias.default):
            return StandIn(args[0].gathered)
        look = _blank if func in _LOOKS_AT_SHAPES else lambda x: x.gathered.whole()
        plain_args, plain_kwargs = tree_map_only(StandIn, look, (args, kwargs))
        result = func(*plain_args, **plain_kwargs)
        return args[0] if args and result is plain_args[0] else result


class Gathered:
    """The values of a shard, on all ranks from the first look on.

    Args:
        shard: has its values.
        device: of the whole tensor.
    """

    def __init__(self, shard: DTensor, device: torch.device) -> None:
        self.shard, self.device = shard, device
        self.tensor: Tensor | None = None

    def whole(self) -> Tensor:
        """Returns the whole tensor, the same with each call. Collective."""
        if self.tensor is None:
            found = gather_on_rank_zero(self.shard.detach())
            empty = torch.empty(self.shard.shape, dtype=self.shard.dtype, device=self.device)
            self.tensor = empty if found is None else found.to(self.device)
            broadcast(self.tensor, self.shard.device_mesh)
        return self.tensor


def _blank(x: StandIn) -> Tensor:
    """Returns the same shape without memory for it."""
    return torch.empty((), dtype=x.dtype, device=x.device).expand(x.shape)


_LOOKS_AT_SHAPES = {
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.new_empty.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
}
