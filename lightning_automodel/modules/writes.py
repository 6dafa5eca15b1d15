"""Tells whether something was written into a tensor that is no parameter of the optimizer, and made it another one."""

from collections.abc import Hashable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_automodel._compat.dtensor.tensors import writes_into
from lightning_automodel._compat.fake.ranks import key_of
from lightning_automodel._compat.fake.shapes import is_fake
from lightning_automodel._compat.torch.tensors import reads_of_data

State = tuple[int, int, Tensor | None]
"""Writes (and reads of ``.data``, which is written into) and memory of a tensor; its values where they are compared."""


class Writes:
    """Compares tensors before and behind a forward pass.

    A write may leave every value as it is (weights that are within the bounds to which they are clamped), which only
    their comparison tells. It waits for the host, so tensors are compared from their second write on: one that was lost
    is made again in the next pass.
    """

    def __init__(self) -> None:
        self._written: set[Hashable] = set()

    def before(self, key: Hashable, tensor: Tensor) -> State:
        """Note what ``tensor`` is now; ``key`` names it in every pass."""
        local = _part_of_rank(tensor)
        values = local.detach().clone() if key in self._written else None
        return writes_into(tensor) + reads_of_data(tensor), key_of(local.untyped_storage()), values

    def changed(self, key: Hashable, tensor: Tensor, before: State) -> bool:
        """Tell whether ``tensor`` is another one than before, as far as is known."""
        version, memory, values = before
        local = _part_of_rank(tensor)
        if key_of(local.untyped_storage()) != memory:
            return True
        if writes_into(tensor) + reads_of_data(tensor) == version:
            return False
        self._written.add(key)
        return values is not None and not is_fake(local) and not torch.equal(values, local)


def _part_of_rank(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()
