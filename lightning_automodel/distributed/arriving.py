"""Tensors on their way to the host, which waits for them alone and not for what the device was asked for since."""

import torch
from torch import Tensor


class Arriving:
    """A copy of ``tensor`` in host memory: begun at once, read later.

    ``tensor.item()`` reads in the order of the stream: it waits for all that was launched before it is called.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._event = torch.cuda.Event() if tensor.is_cuda else None
        self._copy = tensor.detach().to("cpu", non_blocking=tensor.is_cuda)  # into pinned memory
        if self._event is not None:
            self._event.record()

    def read(self) -> Tensor:
        """Return the copy when it is there."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy
