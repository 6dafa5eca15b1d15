"""Code around the forward of a single module, inside of its hooks: names and hooks stay, copies of the module work.

::

    hooks (FSDP2 gathers, local tensors come in) --> around(...) --> the module's own forward --> hooks
"""

import functools
import inspect
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import FrameType, MethodType
from typing import Any, Self

from torch import nn

from lightning_automodel._compat.torch.recomputations import surround_recomputations
from lightning_automodel.modules.authors import links_of, place_of
from lightning_automodel.modules.reachable_code import is_of_library_named

Around = Callable[[nn.Module, Callable[..., Any], tuple, dict[str, Any]], Any]
"""``(module, forward, args, kwargs)`` to what the module returns."""

Context = Callable[[], AbstractContextManager]
Snapshot = Callable[[nn.Module], Context]

_INNER = "_forwards_inside_of_wrappers"
_SNAPSHOTS = "_what_a_recomputation_finds"


def code_of(module: nn.Module) -> Callable[..., Any]:
    """Return the function that a call of ``module`` runs: that of its class, or what was assigned to ``forward``.

    What :func:`wrap_forward` put around it is not meant, nor decorators: where a user's function is around that of a
    library, the user's.
    """
    links = codes_of(module)
    return next((link for link in reversed(links) if not is_of_library_named(place_of(link))), links[-1])


def codes_of(module: nn.Module) -> list[Callable[..., Any]]:
    """List the functions of which :func:`code_of` returns one, the outermost decorator first."""
    links = list(links_of(called_by(module)))
    return [link for link in links if inspect.isfunction(link)] or links


def called_by(module: nn.Module) -> Callable[..., Any]:
    """Return what a call of ``module`` calls first, but for what :func:`wrap_forward` put around it."""
    assigned = vars(module).get(_INNER, [vars(module).get("forward")])[0]
    return type(module).forward if assigned is None else assigned


def wrap_forward(module: nn.Module, around: Around) -> None:
    """Makes ``module.forward(...)`` call ``around(module, forward until now, args, kwargs)``.

    What ``around`` holds in a closure is shared with copies of the module; the module itself it is given.
    """
    inner = module.__dict__.setdefault(_INNER, [])
    depth = len(inner)
    inner.append(module.__dict__.get("forward"))

    @functools.wraps(type(module).forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        previous = self.__dict__[_INNER][depth]
        call = functools.partial(type(self).forward, self) if previous is None else previous
        return around(self, call, args, kwargs)

    module.forward = MethodType(forward, module)


def keep_for_recomputation(block: nn.Module, snapshot: Snapshot) -> None:
    """Run recomputations of ``block`` in the backward pass inside of the context that ``snapshot(block)`` gave in the
    forward pass.

    For what hooks put in place during the forward pass: a recomputation runs without them. So do those that code
    inside of ``block`` asks for, by ``torch.utils.checkpoint``.
    """
    surround_recomputations(_context_in)
    block.__dict__.setdefault(_SNAPSHOTS, []).append(snapshot)


def recomputation_context(block: nn.Module) -> Context:
    """Makes, during the forward pass, the context that restores what ``block`` runs in now."""
    contexts = [snapshot(block) for snapshot in block.__dict__.get(_SNAPSHOTS, ())]
    return lambda: Nested(contexts)


def _context_in(frame: FrameType | None) -> Context | None:
    """Make the context of the innermost module around ``frame`` that keeps one for recomputations."""
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("self",):
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and _SNAPSHOTS in module.__dict__:
                return recomputation_context(module)
        frame = frame.f_back
    return None


class Nested(AbstractContextManager):
    """Nests several contexts to one that can be entered again, as each backward pass through a kept graph does."""

    def __init__(self, makers: Sequence[Context]) -> None:
        self._makers = makers
        self._stack = ExitStack()

    def __enter__(self) -> None:
        self._stack = ExitStack()
        for make in self._makers:
            self._stack.enter_context(make())

    def __exit__(self, *error: Any) -> bool | None:
        return self._stack.__exit__(*error)


def attributes_again(holder: object, *names: str) -> Snapshot:
    """Makes the snapshot of attributes of ``holder``, which later forward passes overwrite."""
    return _Attributes(holder, names)


class SharedByCopies:
    """Hooks that a module and its deep copies have in common, as functions are: they hold process groups."""

    def __deepcopy__(self, memo: dict) -> Self:
        return self


class _Attributes(SharedByCopies):
    """Keeps what attributes were in a forward pass, and puts that back while a recomputation runs."""

    def __init__(self, holder: object, names: tuple[str, ...]) -> None:
        self.holder, self.names = holder, names

    def __call__(self, block: nn.Module) -> Context:
        return functools.partial(self._restored, self._read())

    def _read(self) -> dict[str, Any]:
        return {name: getattr(self.holder, name) for name in self.names}

    def _write(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            setattr(self.holder, name, value)

    @contextmanager
    def _restored(self, then: dict[str, Any]) -> Generator[None, None, None]:
        now = self._read()
        self._write(then)
        try:
            yield
        finally:
            self._write(now)


def named_arguments(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Give those of a call of ``module`` their names."""
    return {**dict(zip(arguments_of(module), args, strict=False)), **kwargs} if args else kwargs


def arguments_of(module: nn.Module) -> list[str]:
    """List the names of the arguments that the class of ``module`` takes, in their order."""
    return _names(type(module).forward)


@functools.cache
def _names(forward: Callable) -> list[str]:
    return list(inspect.signature(forward).parameters)[1:]
