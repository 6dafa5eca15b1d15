"""Writes a checkpoint folder while training goes on, from a copy in host memory.

::

    training    step | weights copied | forward, backward  | waits for the copy, if it must | step | ...
    thread           |                | states copied      | written                        ...

Weights are everybody's, so training waits for their copy. States of optimizers change in steps only: those in host
memory are copied beside the next passes, and the next step waits for what is left.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lightning_automodel._compat.torch.tensors import version_of
from lightning_automodel.checkpointing.files.dcp import Held
from lightning_automodel.checkpointing.files.folder import Contents, is_of_optimizer, save_folder
from lightning_automodel.checkpointing.files.storage import Location
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
        self._memory, self._memory_of_states = HostMemory(), HostMemory()
        self._copied = threading.Event()
        self._step_hook: RemovableHandle | None = None
        self._afterwards: list[Callable[[], None]] = []
        self._is_writing = False
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type, tuple]:
        return BackgroundSaver, ()  # a copy has nothing in flight

    def save(self, contents: Contents, path: Location) -> None:
        """Copies what may change before the next optimizer step to host memory, and returns. Waits for the save before.
        Collective.
        """
        self.wait()
        states, others = _split(contents.tensors)
        versions = _versions(states)
        copied = Contents(self._memory.copy(others), contents.metadata)
        for thread in _in_flight:  # of another trainer: its collectives come before these on every rank
            thread.join()
        timeout = self.timeout
        group = keep(("background", timeout), lambda: dist.new_group(timeout=timeout, backend="gloo"))
        with suppress(OSError):  # which the thread meets as well
            path.parent.make_folder()  # Lightning may put a link to the checkpoint there at once
        self._is_writing = True
        self._copied.clear()
        self._step_hook = register_optimizer_step_pre_hook(self._before_step)
        arguments = (copied, states, versions, path, group)
        target = partial(_on_device, _device_in_use(), self._run)
        self._thread = threading.Thread(target=target, args=arguments, name="checkpoint")
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
        if self._step_hook is not None:
            self._step_hook.remove()
            self._step_hook = None
        if self._error is not None:
            (path, error), self._error = self._error, None
            raise RuntimeError(f"the checkpoint {path} could not be written in the background: {error}") from error

    def close(self) -> None:
        """Waits, and frees the memory and the process group."""
        try:
            self.wait()
        finally:
            self._memory, self._memory_of_states = HostMemory(), HostMemory()

    def _run(
        self, others: Contents, states: Mapping[str, Any], versions: list[int], path: Location, group: ProcessGroup
    ) -> None:
        try:
            copied = self._copy_states(states, versions, group)
            save_folder(Contents({**others.tensors, **copied}, others.metadata), path, group)
        except Exception as error:
            self._error = (path, error)
        with self._lock:
            functions, self._afterwards = self._afterwards, []
            self._is_writing = False
        if self._error is None:
            for function in functions:
                function()

    def _before_step(self, *_: Any) -> None:
        self._copied.wait()

    def _copy_states(self, states: Mapping[str, Any], versions: list[int], group: ProcessGroup) -> dict[str, Any]:
        """Copies what optimizers hold, and fails on every rank where it fails on one. Collective over ``group``."""
        problem, copied = "", {}
        try:
            copied = self._memory_of_states.copy(states)
            if _versions(states) != versions:
                problem = _CHANGED
        except RuntimeError as error:
            problem = str(error)
        finally:
            self._copied.set()
        problems = [""] * dist.get_world_size(group)
        dist.all_gather_object(problems, problem, group=group)
        if found := {rank: text for rank, text in enumerate(problems) if text}:
            raise RuntimeError("; ".join(f"rank {rank}: {text}" for rank, text in found.items()))
        return copied


def _device_in_use() -> int | None:
    return torch.cuda.current_device() if torch.cuda.is_available() and torch.cuda.is_initialized() else None


def _on_device(index: int | None, function: Callable[..., None], *args: Any) -> None:
    """Call ``function`` in a new thread, which CUDA begins on the first device of a machine: torch's writer waits for a
    stream of it, and every rank would hold memory there.
    """
    if index is not None:
        torch.cuda.set_device(index)
    function(*args)


_CHANGED = (
    "states of an optimizer changed outside of its step() before they were copied; leave them alone between a "
    "checkpoint and the next step, or use async_save=False"
)


def _split(tensors: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits off the optimizers whose states are in host memory."""
    states = {name: tree for name, tree in tensors.items() if is_of_optimizer(name) and _is_on_host(tree)}
    return states, {name: tree for name, tree in tensors.items() if name not in states}


def _is_on_host(tree: Any) -> bool:
    return all(held.local.device.type == "cpu" for held in _held(tree))


def _versions(tree: Any) -> list[int]:
    return [version_of(held.local) for held in _held(tree)]


def _held(tree: Any) -> Iterator[Held]:
    if isinstance(tree, Held):
        yield tree
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from _held(item)


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
        if any(held.local.is_cuda for held in _held(tree)):
            torch.cuda.synchronize()
        return result

    def _copy(self, tensor: Tensor, buffer: Tensor | None) -> Tensor:
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
        buffer.copy_(tensor, non_blocking=True)
        self._buffers.append(buffer)
        return buffer
