"""Watches one training step, of a real run or of one that is played: memory, collectives and FLOPs, by phase.

Every number is of this rank. Memory is that of storages: made by an operation, gone with the last tensor on it, resized
by FSDP2. What a storage was for is known afterwards (whether it outlived the forward pass), so a log is kept, and read
when the step has ended.
"""

import re
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_automodel._compat.dtensor.operations import shapes_inferred
from lightning_automodel._compat.fake.cuda import ASKS_DEVICE, device_for_kernels
from lightning_automodel._compat.fake.ranks import group_of, is_wrapper, key_of
from lightning_automodel._compat.torch.pytree import tree_leaves
from lightning_automodel._compat.torch.tensors import EagerMode, name_of_operation, without_functions
from lightning_automodel.gradients import to_local_if_dtensor
from lightning_automodel.planner.formulas import formula_of

PARAMETERS, GRADIENTS, OPTIMIZER, GATHERED = "parameters", "gradients", "optimizer", "gathered parameters"
ACTIVATIONS, LOSS, TEMPORARIES = "activations", "head and loss", "temporaries"
ROLES = (PARAMETERS, GRADIENTS, OPTIMIZER, GATHERED, ACTIVATIONS, LOSS, TEMPORARIES)
FORWARD, HEAD, BACKWARD, CLIPPING, STEP = "forward", "head and loss", "backward", "clipping", "optimizer step"
PHASES = (FORWARD, HEAD, BACKWARD, CLIPPING, STEP)
_MOVES_NOTHING = re.compile("empty|_unsafe_view|resize_|set_|record_stream|wait_tensor")
_SAVED = {FORWARD: ACTIVATIONS, HEAD: LOSS}


@dataclass(eq=False)
class _Held:
    """The memory of one storage."""

    phase: str
    role: str = TEMPORARIES
    bytes: int = 0


@dataclass(frozen=True)
class Collective:
    """A kind of collective over an axis of the mesh, in one phase.

    Attributes:
        kind: such as "all_gather".
        axis: name of the axis, or of several that were flattened.
        phase: in which it was called.
    """

    kind: str
    axis: str
    phase: str


@dataclass
class Watched:
    """What a step did on this rank.

    Attributes:
        counts: calls of each collective.
        volume: bytes of the whole tensor that each collective gathers, reduces or exchanges, summed over its calls.
        flops: floating-point operations of matrix products and attention, by phase, as torch counts them.
        recomputed: those of them that repeat a forward pass within the backward pass.
        traffic: bytes that the other operations read and write, by phase.
        places: bytes of each role at the moment with the most memory, by phase and place in it: within the first two
            blocks, the last two, or outside of blocks. In between it is never more than at both ends.
        saved: bytes that wait for the backward pass when it begins, by role.
        parameters: bytes of each kind of parameter: its name without numbers, and how it is split.
    """

    counts: Counter[Collective] = field(default_factory=Counter)
    volume: Counter[Collective] = field(default_factory=Counter)
    flops: Counter[str] = field(default_factory=Counter)
    recomputed: Counter[str] = field(default_factory=Counter)
    traffic: Counter[str] = field(default_factory=Counter)
    places: dict[tuple[str, str], Counter[str]] = field(default_factory=dict)
    saved: Counter[str] = field(default_factory=Counter)
    parameters: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def peaks(self) -> dict[str, Counter[str]]:
        """Find the bytes of each role at the moment of a phase with the most memory."""
        found: dict[str, Counter[str]] = {}
        for (phase, _), roles in self.places.items():
            if phase not in found or roles.total() > found[phase].total():
                found[phase] = roles
        return found


class Watch(EagerMode):
    """Notes what operations do within this context.

    Args:
        device_type: whose memory is counted.
        axes: name of the axis of each group of ranks; others are called by their size.
    """

    def __init__(self, device_type: str, axes: Mapping[tuple[int, ...], str]) -> None:
        super().__init__()
        self._device_type, self._axes = device_type, axes
        self._held: dict[int, _Held] = {}
        self._log: list[tuple[str, str | None, _Held, int]] = []
        self._phase = FORWARD
        self._place: str | None = ""
        self._times = 1
        self._is_aside = False
        self._patches = ExitStack()
        self.result = Watched()

    @contextmanager
    def phase(self, name: str) -> Generator[None, None, None]:
        """Count what follows to the phase ``name``, within this context."""
        before, self._phase, self._place = self._phase, name, ""
        self._log.append((name, "", _Held(name), 0))  # what is there counts, if nothing more comes
        try:
            yield
        finally:
            self._phase, self._place = before, ""

    def enter(self, name: str, after: str | None = None) -> None:
        """Count what follows to the phase ``name``, if the phase ``after`` is on."""
        if after in (None, self._phase):
            self._phase, self._place = name, ""

    def at(self, place: str | None) -> None:
        """Count what follows to a place in the phase; ``None``: to none of those that are reported."""
        self._place = place

    def few(self, blocks: Sequence[slice]) -> Iterator[slice]:
        """Go through three of ``blocks``: the first, the last, which may be shorter, and one that stands for the rest.

        What a block leaves is freed while the next one runs, so memory is as much as with all of them.
        """
        if len(blocks) <= 3:
            yield from blocks
            return
        yield blocks[0]
        self._times = len(blocks) - 2
        yield blocks[1]
        self._times = 1
        yield blocks[-1]

    @torch.no_grad()
    def hold(self, tensors: Iterable[Tensor | None], role: str, known: str | None = None) -> None:
        """Say what the memory of ``tensors`` is for; it counts from now on if it did not before.

        Args:
            tensors: DTensors by their shards.
            role: one of :data:`ROLES`.
            known: only of memory that was said to be for this.
        """
        for tensor in tensors:
            held = None if tensor is None else self._note(to_local_if_dtensor(tensor))
            if held is not None and known in (None, held.role):
                held.role = role

    def end_forward(self, parameters: Iterable[Tensor]) -> None:
        """Take all memory that is left of the forward pass for what waits for the backward pass.

        Args:
            parameters: of the model; some are gathered still.
        """
        self.hold(parameters, GATHERED, known=TEMPORARIES)
        for held in self._held.values():
            if held.role == TEMPORARIES and held.phase in _SAVED:
                held.role = _SAVED[held.phase]
            self.result.saved[held.role] += held.bytes

    def finish(self) -> Watched:
        """Read the log: the most memory of each phase, and what it was for."""
        now: Counter[str] = Counter()
        total, most = 0, Counter[tuple[str, str]]()
        for phase, place, held, change in self._log:
            now[held.role] += change
            total += change
            if place is not None and total > most[phase, place]:
                most[phase, place] = total
                self.result.places[phase, place] = Counter(now)
        return self.result

    # ---- operations --------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if is_wrapper(types):
            return NotImplemented
        if self._is_aside:
            return func(*args, **(kwargs or {}))
        if func is ASKS_DEVICE:
            return device_for_kernels(args)
        with without_functions():
            out = func(*args, **(kwargs or {}))
            if (group := group_of(func, args)) is not None:
                self._count(func, group, args, out)
            else:
                self._work(func, args, kwargs or {}, out)
            for value in tree_leaves(out):
                if isinstance(value, Tensor):
                    self._note(value)
        return out

    def _work(self, func: Any, args: tuple, kwargs: dict[str, Any], out: Any) -> None:
        if any(isinstance(x, Tensor) and x.device.type == "meta" for x in args):
            return
        if (formula := formula_of(func)) is not None:
            flops = self._times * formula(*args, **kwargs, out_val=out)
            self.result.flops[self._phase] += flops
            if self._phase == BACKWARD and torch.is_grad_enabled():  # autograd's own operations note no gradients
                self.result.recomputed[self._phase] += flops
        elif not func.is_view and not _MOVES_NOTHING.search(name_of_operation(func)):
            moved = [
                x for x in tree_leaves((args, out)) if isinstance(x, Tensor) and x.device.type == self._device_type
            ]
            self.result.traffic[self._phase] += self._times * _bytes(moved)

    def _count(self, func: Any, group: dist.ProcessGroup, args: tuple, out: Any) -> None:
        sizes = [_bytes(tree_leaves(value)) for value in (*args, out)]
        ranks = tuple(dist.get_process_group_ranks(group))
        if len(ranks) == 1:
            return
        key = Collective(_kind(func), self._axes.get(ranks, f"{len(ranks)} ranks"), self._phase)
        self.result.counts[key] += self._times
        self.result.volume[key] += self._times * max(sizes)

    # ---- memory ------------------------------------------------------------------------------------------------------

    def _note(self, tensor: Tensor) -> _Held | None:
        if tensor.device.type != self._device_type:
            return None
        storage = tensor.untyped_storage()
        key = key_of(storage)
        if key not in self._held:
            self._held[key] = _Held(self._phase)
            weakref.finalize(storage, self._free, key).atexit = False
            self._change(self._held[key], storage.nbytes())
        return self._held[key]

    def _free(self, key: int) -> None:
        held = self._held.pop(key)
        self._change(held, -held.bytes)

    def _change(self, held: _Held, change: int) -> None:
        held.bytes += change
        if change:
            self._log.append((self._phase, self._place, held, change))

    @contextmanager
    def _aside(self) -> Generator[None, None, None]:
        """Count nothing within this context."""
        before, self._is_aside = self._is_aside, True
        try:
            yield
        finally:
            self._is_aside = before

    def __enter__(self) -> "Watch":
        self._patches.enter_context(shapes_inferred(self._aside))
        self._resize: Callable = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = lambda storage, size: self._resized(storage, size)  # type: ignore
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        self._patches.close()
        super().__exit__(*error)

    def _resized(self, storage: torch.UntypedStorage, size: int) -> Any:
        result = self._resize(storage, size)
        if (held := self._held.get(key_of(storage))) is not None:
            held.role = GATHERED if held.role == TEMPORARIES else held.role
            self._change(held, size - held.bytes)
        return result


def _bytes(values: Iterable[Any]) -> int:
    return sum(x.numel() * x.element_size() for x in values if isinstance(x, Tensor))


_KINDS = ("all_gather", "allgather", "reduce_scatter", "all_reduce", "allreduce", "all_to_all", "alltoall", "broadcast")


def _kind(func: Any) -> str:
    name = name_of_operation(func).partition("::")[2].strip("_")
    found = next((kind for kind in _KINDS if name.startswith(kind)), name)
    return {"allgather": "all_gather", "allreduce": "all_reduce", "alltoall": "all_to_all"}.get(found, found)
