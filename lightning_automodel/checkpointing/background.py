"""Writes a checkpoint folder while training goes on: training waits for the copy to host memory only."""

import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_automodel.checkpointing.dcp import Held
from lightning_automodel.checkpointing.folder import Contents, save_folder
from lightning_automodel.checkpointing.storage import Location
from lightning_automodel.distributed.kept_groups import keep

_in_flight: list[threading.Thread] = []


class BackgroundSaver:
    """Writes one checkpoint at a time, in a thread of its own and through a process group for nothing else.

    An error of a save is raised, on every rank, by the next call of :meth:`save` or :meth:`wait`.

    Attributes:
        timeout: of the collectives of a save; ``None``: torch's default.
    """

    def __init__(self) -> None:
        self.timeout: timedelta | None = None
        self._thread: threading.Thread | None = None
        self._error: tuple[Location, Exception] | None = None
        self._memory = HostMemory()
        self._afterwards: list[Callable[[], None]] = []
        self._is_writing = False
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type, tuple]:
        return BackgroundSaver, ()  # a copy has nothing in flight

    def save(self, contents: Contents, path: Location) -> None:
        """Copies what this rank holds to host memory, and returns. Waits for the save before. Collective."""
        self.wait()
        copied = Contents(self._memory.copy(contents.tensors), contents.metadata)
        for thread in _in_flight:  # of another trainer: its collectives come before these on every rank
            thread.join()
        timeout = self.timeout
        group = keep(("background", timeout), lambda: dist.new_group(timeout=timeout, backend="gloo"))
        self._is_writing = True
        self._thread = threading.Thread(target=self._run, args=(copied, path, group), name="checkpoint")
        _in_flight[:] = [self._thread]
        self._thread.start()

    def afterwards(self, function: Callable[[], None]) -> None:
        """Calls ``function`` when the save in flight has succeeded, or now if there is none; never if it failed."""
        with self._lock:
            if self._is_writing:
                self._afterwards.append(function)
                return
        if self._error is None:
            function()

    def wait(self) -> None:
        """Returns when no save is in flight.

        Raises:
            RuntimeError: if the save failed; once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            (path, error), self._error = self._error, None
            raise RuntimeError(f"the checkpoint {path} could not be written in the background: {error}") from error

    def close(self) -> None:
        """Waits, and frees the memory and the process group."""
        try:
            self.wait()
        finally:
            self._memory = HostMemory()

    def _run(self, contents: Contents, path: Location, group: ProcessGroup) -> None:
        try:
            save_folder(contents, path, group)
        except Exception as error:
            self._error = (path, error)
        with self._lock:
            functions, self._afterwards = self._afterwards, []
            self._is_writing = False
        if self._error is None:
            for function in functions:
                function()


class HostMemory:
    """Copies of tensors in host memory (pinned for those of a GPU), which is kept for the next copies."""

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def copy(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """Copies a tree of ``Held`` into the staging memory, over what was copied before."""
        unused = iter(list(self._buffers))
        self._buffers = []

        def copied(value: Any) -> Any:
            if isinstance(value, Held):
                return Held(self._copy(value.local, next(unused, None)), value.shape, value.boxes)
            return {key: copied(item) for key, item in value.items()} if isinstance(value, Mapping) else value

        result = copied(tree)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return result

    def _copy(self, tensor: Tensor, buffer: Tensor | None) -> Tensor:
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
        buffer.copy_(tensor, non_blocking=True)
        self._buffers.append(buffer)
        return buffer
