"""What modules keep from one forward pass to the next (running statistics, codebooks, counters), and how a pass that is
computed again finds what the first one found, and leaves what that one left.
"""

import dis
import functools
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_automodel._compat.dtensor.tensors import writes_into
from lightning_automodel._compat.fake.shapes import is_fake
from lightning_automodel.modules.forward import code_of
from lightning_automodel.modules.reachable_code import is_of_library, reachable_code

_HOLDERS = "_modules_that_may_keep_something"
_CHANGES = "_changes_what_it_keeps"
_NUMBERS = (bool, int, float, str, type(None))
_ABSENT = object()

Holder = tuple[nn.Module, tuple[str, ...]]
"""A module and those of its attributes that its forward pass may set; its buffers are meant, too."""


def may_keep_something(root: nn.Module) -> bool:
    """Tell whether a forward pass of ``root`` has changed what its modules keep, or none was watched yet that may."""
    return any(vars(module).get(_CHANGES, True) for module, _ in _holders_in(root))


def has_been_watched(root: nn.Module) -> bool:
    """Tell whether a forward pass of ``root`` has shown what its modules change."""
    return all(_CHANGES in vars(module) for module, _ in _holders_in(root))


class KeptState:
    """What the modules below ``root`` keep now, before a forward pass.

    Buffers, and numbers and tensors without a graph in attributes that code of users sets. What the pass leaves as it
    is, :meth:`settle` forgets.
    """

    def __init__(self, root: nn.Module) -> None:
        self._by_module = [
            (module, [_Kept(*place) for place in _places(module, names)]) for module, names in _holders_in(root)
        ]

    def settle(self) -> None:
        """Take note, behind the forward pass, of what it has changed: of a module that changes something, all it keeps.

        Running statistics are written into without a count, beside one that counts or not: the first pass compares.
        """
        changed = []
        for module, kept in self._by_module:
            is_first = _CHANGES not in vars(module)
            if vars(module).get(_CHANGES, False) or any(one.has_changed(is_first) for one in kept):
                vars(module)[_CHANGES] = True
                changed.append((module, kept))
            elif is_first:
                vars(module)[_CHANGES] = False
        self._by_module = changed

    @contextmanager
    def again(self) -> Generator[None, None, None]:
        """Put what was kept before the pass in place, each time anew, and then what is kept now."""
        every = [one for _, kept in self._by_module for one in kept]
        now = [one.begin() for one in every]
        try:
            yield
        finally:
            for one, value in zip(every, now, strict=True):
                one.put(value)


class _Kept:
    """A value under a name in the dict of a module's buffers, or of its attributes."""

    def __init__(self, values: dict[str, Any], name: str) -> None:
        self._values, self._name = values, name
        self._before = values.get(name, _ABSENT)
        is_tensor = isinstance(self._before, Tensor)
        self._copy = self._before.detach().clone() if is_tensor else self._before
        self._writes = writes_into(self._before) if is_tensor else 0

    def has_changed(self, compares: bool) -> bool:
        value = self._values.get(self._name, _ABSENT)
        if value is not self._before:
            return True
        if not isinstance(value, Tensor):
            return False
        if writes_into(value) != self._writes:
            return True
        return compares and not is_fake(value) and not torch.equal(value, self._copy)

    def begin(self) -> Any:
        now = self._values.get(self._name, _ABSENT)
        self.put(self._copy.clone() if isinstance(self._copy, Tensor) else self._copy)
        return now

    def put(self, value: Any) -> None:
        if value is _ABSENT:
            self._values.pop(self._name, None)
        else:
            self._values[self._name] = value


def _holders_in(root: nn.Module) -> list[Holder]:
    """List the modules below ``root`` that may keep something, as they are when this is asked first."""
    if _HOLDERS not in vars(root):
        found = ((module, _attributes_set_by(module)) for module in root.modules())
        vars(root)[_HOLDERS] = [(module, names) for module, names in found if names or _buffers_of(module)]
    return vars(root)[_HOLDERS]


def _places(module: nn.Module, names: tuple[str, ...]) -> Iterator[tuple[dict[str, Any], str]]:
    attributes = vars(module)
    for name in _buffers_of(module):
        yield attributes["_buffers"], name
    for name in names:
        value = attributes.get(name, _ABSENT)
        if isinstance(value, _NUMBERS) or value is _ABSENT or (isinstance(value, Tensor) and _is_plain(value)):
            yield attributes, name


def _buffers_of(module: nn.Module) -> list[str]:
    buffers = vars(module)["_buffers"]
    return [name for name, buffer in buffers.items() if buffer is not None and _is_plain(buffer)]


def _is_plain(tensor: Tensor) -> bool:
    """Tell whether writes into the tensor are counted, and whether it has no graph that would be kept with it."""
    return not (tensor.is_inference() or tensor.requires_grad)


def _attributes_set_by(module: nn.Module) -> tuple[str, ...]:
    code = code_of(module)
    own: tuple[str, ...] = () if is_of_library(code) else _names_set(code, type(module))  # type: ignore[arg-type]
    return tuple(name for name in own if name not in ("_buffers", *vars(module)["_buffers"]))


@functools.cache
def _names_set(function: Any, kind: type) -> tuple[str, ...]:
    codes = reachable_code([function], [kind])
    return tuple(sorted({name for code in codes for name in _stores_of(code)}))


def _stores_of(code: CodeType) -> Iterator[str]:
    for part in (code, *(constant for constant in code.co_consts if isinstance(constant, CodeType))):
        yield from (i.argval for i in dis.get_instructions(part) if i.opname == "STORE_ATTR")
