"""Refuses what is written into gathered copies behind a forward pass: they are freed, and the shards would not have it.

::

    forward pass     computes with gathered copies, some of which stay until the backward pass
    behind it        w.mul_(), w.data.clamp_()      in the copy
    backward pass    frees it
"""

from collections.abc import Callable, Hashable, Iterable

import torch
from torch import Tensor

from lightning_automodel._compat.dtensor import writes_into
from lightning_automodel._compat.fake_shapes import is_fake
from lightning_automodel._compat.tensors import reads_of_data
from lightning_automodel.distributed.shards import local_tensor


class WrittenCopies:
    """Compares copies behind a forward pass with what they are before they are freed.

    torch counts what is written into a tensor, but not into its ``data``. Copies of which that was read are compared by
    value from the second time on, which takes their memory once more and waits for the host.
    """

    def __init__(self) -> None:
        self._read: set[Hashable] = set()
        self._noted: dict[Hashable, tuple[Tensor, int, int, Tensor | None]] = {}

    def note(self, copies: Iterable[tuple[Hashable, Tensor]]) -> None:
        """Note what ``copies`` are now; what names them is the same in every pass."""
        self._noted = {
            key: (copy, writes_into(copy), reads_of_data(copy), _values(copy) if key in self._read else None)
            for key, copy in copies
        }

    def check(self, describe: Callable[[Hashable], str]) -> None:
        """Look at them, once.

        Args:
            describe: names a parameter by its key.

        Raises:
            ValueError: naming one that was written into.
        """
        noted, self._noted = self._noted, {}
        for key, (copy, writes, reads, values) in noted.items():
            if writes_into(copy) != writes or self._is_another(key, copy, reads, values):
                raise ValueError(
                    f"{describe(key)} was written into behind a forward pass, where it is a gathered copy that the "
                    "backward pass frees: the sharded parameter has not changed. Write before the model is called "
                    "(on_train_batch_start), or behind the backward pass (on_train_batch_end); call a model that no "
                    "backward pass follows within torch.no_grad()"
                )

    def _is_another(self, key: Hashable, copy: Tensor, reads: int, values: Tensor | None) -> bool:
        if reads_of_data(copy) == reads:
            return False
        self._read.add(key)
        local = local_tensor(copy)
        is_there = not is_fake(local) and local.untyped_storage().size() > 0
        return values is not None and is_there and not torch.equal(values, local)


def _values(copy: Tensor) -> Tensor:
    return local_tensor(copy).detach().clone()
