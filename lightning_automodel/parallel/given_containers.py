"""Lets units write into lists, dicts, dataclasses and objects of a user's that they are called with. Of some of them
wrappers give them copies.

FSDP2 and Megatron-FSDP put an autograd function around the tensors that enter a unit, or cast or move them, and build
what holds them anew::

    one process    losses = []    block 0 appends a    block 1 appends b                        losses == [a, b]
    FSDP2          losses = []    block 0 appends a    block 1 appends b to a copy of [a]       losses == [a]
"""

import itertools
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import FrozenInstanceError, fields, is_dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_automodel._compat.torch.pytree import tree_leaves
from lightning_automodel._compat.transformers.models import recordings_of_call
from lightning_automodel.modules.forward import SharedByCopies, wrap_forward
from lightning_automodel.modules.reachable_code import is_of_library

Watch = Callable[[nn.Module, Sequence[Tensor]], None]
"""``(module, tensors)``, of which each may be where a backward pass enters the module"""

Change = Callable[[Tensor, str], Tensor]
"""A tensor, and where it is, to what is to be in its place."""

_DEPTH = 4  # of containers in each other


def keep_given_containers(module: nn.Module, watch: Watch) -> None:
    """Let ``module``, whose arguments a wrapper copies, write into those that it was called with.

    Called behind the hooks of that wrapper.

    Args:
        module: is called.
        watch: is told of tensors that the module has put there, through which a gradient may come back.
    """
    given = _Given(watch)
    module.register_forward_pre_hook(given.take, prepend=True, with_kwargs=True)
    wrap_forward(module, given)


class _Given(SharedByCopies):
    """Takes what a call gives before the wrapper does, and compares it with what arrives."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._given: list[Any] = []

    @torch.compiler.disable
    def take(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self._given = [*args, *kwargs.values()]

    def __call__(self, module: nn.Module, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        recordings = [found] if (found := recordings_of_call()) else []
        given, self._given = [*self._given, *recordings], []
        arrived = [*args, *kwargs.values(), *recordings]
        output, new = giving_back(given, arrived, lambda: forward(*args, **kwargs))
        if new:
            self._watch(module, new)
        return output


def giving_back(
    given: Sequence[Any], arrived: Sequence[Any], run: Callable[[], Any], change: Change | None = None
) -> tuple[Any, list[Tensor]]:
    """Write what ``run`` writes into containers that ``arrived``, which may be copies, into those that were ``given``.

    Args:
        given: values, some of which hold others.
        arrived: the same values, or copies of them.
        run: may write into what arrived.
        change: what becomes of tensors that are written and require a gradient.

    Returns:
        what ``run`` returns, where what was given stands in the place of its copies, and the tensors that it has
        written and that require a gradient.
    """
    containers = copies_of(given, arrived, change)
    output = with_originals(run(), containers)
    return output, [tensor for container in containers for tensor in container.give_back()]


def with_originals(output: Any, containers: Sequence["Copied"]) -> Any:
    """Return ``output`` with what was given in the place of its copies."""
    originals = {id(c.arrived): c.given for c in containers if c.arrived is not c.given}
    return changed(output, lambda x, _: x, originals=originals) if originals else output


def copies_of(given: Sequence[Any], arrived: Sequence[Any], change: Change | None = None) -> list["Copied"]:
    """List what can be written into, of values that were ``given`` and ``arrived`` as they are, or as copies."""
    pairs = [pair for one, other in zip(given, arrived, strict=False) for pair in _pairs(one, other, _DEPTH)]
    return [Copied(one, other, change) for one, other in pairs]


def recomputed_with(forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Callable[..., Any]:
    """Make of ``forward`` a function of ``args`` whose first call is with them, and whose later ones, which compute the
    first again, are with what lists, dicts and dataclasses held before it.
    """
    given = [*args, *kwargs.values()]
    if not any(True for value in given for _ in _pairs(value, value, _DEPTH)):
        return partial(forward, **kwargs)
    before, calls = copied(given), itertools.count()

    def call(*now: Any) -> Any:
        if next(calls) == 0:
            return forward(*now, **kwargs)
        again = copied(before)
        return forward(*again[: len(args)], **dict(zip(kwargs, again[len(args) :], strict=True)))

    return call


def copied(value: Any, depth: int = _DEPTH + 1, change: Callable[[Tensor], Tensor] | None = None) -> Any:
    """Copy containers in each other; what else they hold is the same, or what ``change`` makes of a tensor."""
    if isinstance(value, Tensor):
        return change(value) if change else value
    items = _items(value) if depth else None
    if items is None:
        return value
    values = {key: copied(item, depth - 1, change) for key, item in items.items()}
    return _like(value, values)


def changed(
    value: Any, change: Change, place: str = "", depth: int = _DEPTH, originals: Mapping[int, Any] | None = None
) -> Any:
    """Return ``value`` with what ``change`` makes of each tensor in containers in each other, which are copied where
    that is another tensor. By their ids, containers may have others in their places.
    """
    if isinstance(value, Tensor):
        return change(value, place)
    if originals and id(value) in originals:
        return originals[id(value)]
    items = _items(value) if depth else None
    values = {key: changed(x, change, f"{place}.{key}", depth - 1, originals) for key, x in (items or {}).items()}
    if items is None or all(values[key] is x for key, x in items.items()):
        return value
    return _like(value, values)


def tensors_within(value: Any, depth: int = _DEPTH) -> Iterator[Tensor]:
    """Yield the tensors in containers in each other, as :func:`changed` comes by them."""
    if isinstance(value, Tensor):
        yield value
    elif depth:
        for item in (_items(value) or {}).values():
            yield from tensors_within(item, depth - 1)


def _pairs(given: Any, arrived: Any, depth: int) -> Iterator[tuple[Any, Any]]:
    """Find what can be written into, in what was given and, at the same place, in what arrived."""
    if isinstance(given, Tensor) or depth == 0 or type(given) is not type(arrived):
        return
    items, others = _items(given), _items(arrived)
    if items is None or others is None or items.keys() != others.keys():
        return
    if not isinstance(given, tuple):
        yield given, arrived
    for key, value in items.items():
        yield from _pairs(value, others[key], depth - 1)


def _items(value: Any) -> dict[Any, Any] | None:
    """List what a container holds now, by key, index, field or attribute."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name, None) for field in fields(value)} | getattr(
            value, "__dict__", {}
        )
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    return dict(vars(value)) if _is_of_user(value) else None


def _is_of_user(value: Any) -> bool:
    if isinstance(value, SimpleNamespace):
        return True
    return hasattr(value, "__dict__") and not isinstance(value, nn.Module | type) and not is_of_library(type(value))


class Copied:
    """A container that was given, and the one that arrived: a copy, or the same."""

    def __init__(self, given: Any, arrived: Any, change: Change | None = None) -> None:
        self.given, self.arrived, self._change = given, arrived, change
        self._items, self._before = _items(given) or {}, _items(arrived) or {}

    def give_back(self) -> list[Tensor]:
        """Write the changes of the copy into what was given.

        Returns:
            the tensors among them that require a gradient.
        """
        before, after = self._before, _items(self.arrived) or {}
        written = [key for key, value in after.items() if key not in before or before[key] is not value]
        removed = before.keys() - after.keys()
        known = {id(value) for value in before.values()}
        if self._change is not None:
            after |= {key: changed(after[key], partial(self._changed, known)) for key in written}
        if (self.given is not self.arrived or self._change is not None) and (written or removed):
            origins = {id(value): self._items[key] for key, value in before.items()}
            values = {key: origins.get(id(value), value) for key, value in after.items()}
            _write(self.given, values, written, removed)
        leaves = tree_leaves([after[key] for key in written])
        return [x for x in leaves if isinstance(x, Tensor) and x.requires_grad and id(x) not in known]

    def _changed(self, known: Container[int], value: Tensor, place: str) -> Tensor:
        assert self._change is not None
        return self._change(value, place) if value.requires_grad and id(value) not in known else value


def _like(container: Any, values: dict[Any, Any]) -> Any:
    """Copy a container with other values in it."""
    if isinstance(container, tuple):
        kind = type(container)
        return kind(*values.values()) if hasattr(container, "_fields") else kind(values.values())
    if type(container) in (list, dict):  # graphs have no ``copy`` of these
        return list(values.values()) if isinstance(container, list) else values
    again = copy(container)
    _write(again, values, list(values), set())
    return again


def _write(container: Any, values: dict[Any, Any], changed: Sequence[Any], removed: set[Any]) -> None:
    if isinstance(container, list):
        container[:] = values.values()
        return
    if not is_dataclass(container):
        held = container if isinstance(container, dict) else vars(container)
        for key in removed:
            del held[key]
        held.update({key: values[key] for key in changed})
        return
    for key in changed:
        _set(container, key, values[key])


def _set(container: Any, field: str, value: Any) -> None:
    try:
        setattr(container, field, value)
    except FrozenInstanceError:  # a copy of one
        object.__setattr__(container, field, value)
