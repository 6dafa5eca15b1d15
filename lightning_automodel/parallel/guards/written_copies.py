"""Refuses what is written into gathered copies behind a forward pass: they are freed, and the shards would not have it.

::

    forward pass     computes with gathered copies, some of which stay until the backward pass
    behind it        w.mul_(), w.data.clamp_()      in the copy
    backward pass    frees it
"""

from collections.abc import Callable, Hashable, Iterable

from torch import Tensor

from lightning_automodel._compat.dtensor.tensors import writes_into
from lightning_automodel.distributed.shards import local_tensor
from lightning_automodel.modules.writes import State, Writes


class WrittenCopies:
    """Compares copies behind a forward pass with what they are before they are freed.

    torch counts what is written into a tensor, which is refused at once, but not what is written into its ``data``,
    of which :class:`Writes` compares values from the second time on.
    """

    def __init__(self) -> None:
        self._writes = Writes()
        self._noted: dict[Hashable, tuple[Tensor, int, State]] = {}

    def note(self, copies: Iterable[tuple[Hashable, Tensor]]) -> None:
        """Note what ``copies`` are now; what names them is the same in every pass."""
        self._noted = {key: (copy, writes_into(copy), self._writes.before(key, copy)) for key, copy in copies}

    def check(self, describe: Callable[[Hashable], str]) -> None:
        """Look at them, once.

        Args:
            describe: names a parameter by its key.

        Raises:
            ValueError: naming one that was written into.
        """
        noted, self._noted = self._noted, {}
        for key, (copy, writes, state) in noted.items():
            is_there = local_tensor(copy).untyped_storage().size() > 0
            if writes_into(copy) != writes or (is_there and self._writes.changed(key, copy, state)):
                raise ValueError(
                    f"{describe(key)} was written into behind a forward pass, where it is a gathered copy that the "
                    "backward pass frees: the sharded parameter has not changed. Write before the model is called "
                    "(on_train_batch_start), or behind the backward pass (on_train_batch_end); call a model that no "
                    "backward pass follows within torch.no_grad()"
                )
