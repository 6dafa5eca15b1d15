"""Random numbers in blocks whose values are sliced over tp: different on each rank, or a slice of the whole draw.

::

    whole (a residual stream, a router's input)      every rank draws the same
    partial sums (behind a row-wise layer)           every rank draws the same: m * a + m * b = m * (a + b)
    slices (heads, features, rows of the sequence)   CPU: the whole is drawn, and cut; else a stream for each rank

Which draw is which, the block says itself: its twin runs on meta as one process would run it (``twins.py``), and where
the shapes differ a rank has a slice.
"""

import copy
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_automodel._compat.torch.tensors import TorchDispatchMode, name_of_operation
from lightning_automodel.distributed.logs import warn_once
from lightning_automodel.distributed.random_numbers import drawing_aside, generator_states, restore_generators
from lightning_automodel.modules.forward import Context, keep_for_recomputation, wrap_forward
from lightning_automodel.modules.structure import class_names, find_blocks
from lightning_automodel.parallel.tensor.cut_draws import UNKNOWN, WHOLE, Cut, draw_whole, find_cut
from lightning_automodel.parallel.tensor.parts import dim_of_part
from lightning_automodel.parallel.tensor.stream import LENGTH, Stream
from lightning_automodel.parallel.tensor.twins import (
    WholeDraws,
    is_draw,
    shape_of_draw,
    twin_of,
    whole_draws,
)

_DRAWS = "_draws_of_block"


def find_twins(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the twin of each block by the block's name, to be made before the blocks are split."""
    return {name: twin_of(block) for name, block in find_blocks(model).items()}


def install_sliced_draws(
    model: nn.Module, group: ProcessGroup, twins: dict[str, nn.Module], streams: Mapping[str, Stream]
) -> None:
    """Make the blocks of ``model``, while they train, draw what one process draws, or what differs between slices.

    Args:
        model: split over ``group``.
        group: of the tp axis.
        twins: from :func:`find_twins`.
        streams: residual streams that are cut on the sequence, by the names of blocks.
    """
    for name, twin in twins.items():
        block = model.get_submodule(name)
        block.__dict__[_DRAWS] = _BlockDraws(group, twin, streams.get(name))
        block.register_forward_pre_hook(_plan_draws, prepend=True, with_kwargs=True)
        wrap_forward(block, _around)
        keep_for_recomputation(block, _again)


def draws_in_slices(block: nn.Module) -> bool:
    """Tells whether a compiled graph of ``block`` would draw wrongly."""
    draws = block.__dict__.get(_DRAWS)
    return draws is not None and block.training and draws.is_watched


# ---- around a block --------------------------------------------------------------------------------------------------


def _plan_draws(block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    if block.training:
        block.__dict__[_DRAWS].begin(block, args, kwargs)


def _around(block: nn.Module, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    if torch.compiler.is_compiling() or not block.training:
        return forward(*args, **kwargs)
    draws: _BlockDraws = block.__dict__[_DRAWS]
    with draws.watching(class_names(block)[0], 0) if draws.is_watched else draws.unwatched():
        return forward(*args, **kwargs)


def _again(block: nn.Module) -> Context:
    """Resume the draws of a part of a block that is computed again where the part began, watched as it was."""
    draws: _BlockDraws = block.__dict__[_DRAWS]
    then = draws.is_watched, draws.length
    place = draws.place

    @contextmanager
    def again() -> Generator[None, None, None]:
        now = draws.is_watched, draws.length
        draws.is_watched, draws.length = then
        try:
            with draws.watching(class_names(block)[0], place) if draws.is_watched else draws.unwatched():
                yield
        finally:
            draws.is_watched, draws.length = now

    return again


# ---- the draws of a block --------------------------------------------------------------------------------------------


@dataclass
class _Plan:
    whole: WholeDraws
    cuts: dict[int, Cut | str] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Tell whether nothing is cut, once all has been drawn."""
        seen = len(self.cuts) == len(self.whole.shapes) and self.whole.is_complete and not self.whole.passed_over
        return seen and all(cut == WHOLE for cut in self.cuts.values())


class _BlockDraws:
    """What one block draws, and how it is cut: known from the first training pass on, for each length of slices.

    Attributes:
        is_watched: operations are looked at, because some draws are cut, or it is not known yet.
        length: of the sequence that is cut; ``None``: it is whole.
        place: of the next draw in this pass.
    """

    def __init__(self, group: ProcessGroup, twin: nn.Module, stream: Stream | None) -> None:
        self.group, self.twin, self.stream = group, twin, stream
        self.is_watched = True
        self.length: int | None = None
        self.place = 0
        self._plans: dict[int | None, _Plan] = {}
        self._is_running = False
        self._draws = True
        self._parts: set[str] = set()
        self._inside = 0

    def __deepcopy__(self, memo: dict) -> "_BlockDraws":
        return _BlockDraws(self.group, copy.deepcopy(self.twin, memo), self.stream)

    def begin(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Begin a forward pass in training: find the length of its slices, and what the twin draws at that length."""
        value = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        if self.stream is not None and value is not None and value.ndim > 2:
            self.length = self._length_of(value) or value.shape[1]
        if self.is_watched and self.length not in self._plans:
            plan = _Plan(whole_draws(self.twin, args, kwargs, self._shape_of))
            self._plans[self.length] = plan
            self._draws = not plan.whole.is_complete or bool(plan.whole.shapes or plan.whole.passed_over)
            self.is_watched = self._draws
            self._note_parts(block, plan.whole.passed_over)

    def _note_parts(self, block: nn.Module, names: list[str]) -> None:
        """Count, from now on, the parts that run and that the twin has passed over."""
        for name in set(names) - self._parts:
            part = block.get_submodule(name)
            part.register_forward_pre_hook(self._enter_part)
            part.register_forward_hook(self._leave_part, always_call=True)
        self._parts |= set(names)

    def _enter_part(self, *_: Any) -> None:
        self._inside += 1

    def _leave_part(self, *_: Any) -> None:
        self._inside -= 1

    def _length_of(self, value: Tensor) -> int | None:
        """Tokens of the whole sequence that ``value`` is a slice of; FSDP2 hands on a tensor without the attribute."""
        is_slice = self.stream is not None and self.stream.running and self.stream.is_slice(value)
        return getattr(value, LENGTH, self.stream.length if self.stream is not None and is_slice else None)

    def _shape_of(self, value: Tensor) -> list[int]:
        """Return the shape of the whole of which ``value`` is a slice: of the sequence, or of the heads."""
        shape = list(value.shape)
        if (length := self._length_of(value)) is not None:
            shape[1] = length
        elif (dim := dim_of_part(value)) is not None:
            shape[dim] *= self.group.size()
        return shape

    @contextmanager
    def watching(self, name: str, place: int) -> Generator[None, None, None]:
        """Cut draws within this context, from the one at ``place`` on."""
        self.place = place
        if self._is_running:  # in a recomputation: its context, and what wraps the block
            yield
            return
        self._is_running = True
        try:
            with _Watch(self, name):
                yield
        finally:
            self._is_running = False
        self.is_watched = self.stream is not None or not self._plans[self.length].is_whole

    @contextmanager
    def unwatched(self) -> Generator[None, None, None]:
        """Run a block that draws nothing in slices. If it draws all the same (dropout was switched on meanwhile), ranks
        go on together, and the next pass is watched.
        """
        before = generator_states()
        yield
        if not self._draws and any(not torch.equal(x, y) for x, y in zip(before, generator_states(), strict=False)):
            restore_generators(before)
            torch.randint(2, ())
            self._plans, self.is_watched = {}, True

    def draw(self, name: str, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Carries out one operation that draws."""
        local = shape_of_draw(args)
        cut = UNKNOWN if self._inside else self._cut_of(local)
        self.place += not self._inside
        if cut == WHOLE:
            return func(*args, **kwargs)
        if not isinstance(cut, Cut) or "randperm" in name_of_operation(func):
            warn_once(_cannot_tell(name, func, local))
            with drawing_aside(WHOLE):
                return func(*args, **kwargs)
        if (result := draw_whole(cut, func, args, kwargs, local, self.group)) is not None:
            return result
        with drawing_aside(self.group.rank()):
            return func(*args, **kwargs)

    def _cut_of(self, local: torch.Size) -> Cut | str:
        plan, place = self._plans[self.length], self.place
        if place >= len(plan.whole.shapes):
            return UNKNOWN
        if place not in plan.cuts:
            whole, per_row = plan.whole, plan.whole.per_row.get(place)
            plan.cuts[place] = find_cut(whole.shapes[place], local, whole.rows, self.group, self.length, per_row)
        cut = plan.cuts[place]
        return UNKNOWN if isinstance(cut, Cut) and not cut.fits(local) else cut


class _Watch(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, draws: _BlockDraws, name: str) -> None:
        super().__init__()
        self._draws, self._name = draws, name

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if is_draw(func, args, kwargs or {}):
            return self._draws.draw(self._name, func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _cannot_tell(name: str, func: Any, local: torch.Size) -> str:
    return (
        f"{func} draws numbers of shape {list(local)} in a {name}, and whether these are slices over tp is not known, "
        "since the block cannot run without values up to there: all ranks of tp draw the same numbers, which is right "
        "for whole values and correlates those of slices"
    )
