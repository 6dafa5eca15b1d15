"""What code runs behind a function, as far as names lead: structure that no attribute of a module tells."""

import dis
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache, cached_property, partial
from itertools import islice, pairwise
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from lightning_automodel.modules.authors import place_of

LIBRARIES = {"lightning", "lightning_automodel", "peft", "pytorch_lightning", "torch", "torchmetrics", "transformers"}


def names_in(code: CodeType) -> set[str]:
    """List the attributes, globals and imports that ``code`` names, and functions written within it."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(names_in, inner))


def strings_in(code: CodeType) -> set[str]:
    """List the strings that ``code`` holds, and functions written within it: names for ``getattr``, among others."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return {c for c in code.co_consts if isinstance(c, str)}.union(*map(strings_in, inner))


def attributes_of(owners: Collection[str], code: CodeType) -> set[str]:
    """List the attributes that ``code`` reads of attributes with these names: ``weight`` of ``self.q_proj.weight``."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    loads = pairwise(dis.get_instructions(code))
    found = {
        str(i.argval) for before, i in loads if i.opname == before.opname == "LOAD_ATTR" and before.argval in owners
    }
    return found.union(*(attributes_of(owners, part) for part in inner))


def may_change_tensors(code: CodeType) -> bool:
    """Tell whether ``code`` has what changes a tensor in place: ``x *= 2``, ``x[0] = 1``, ``x.mul_(2)``.

    ``n += 1`` looks alike; what is stored under a word is an entry of a dict.
    """
    before = None
    for i in dis.get_instructions(code):
        is_word = before is not None and before.opname == "LOAD_CONST" and isinstance(before.argval, str)
        name = i.argval if i.opname in ("LOAD_ATTR", "LOAD_METHOD") else ""
        if (i.opname == "STORE_SUBSCR" and not is_word) or (i.opname == "BINARY_OP" and i.argrepr.endswith("=")):
            return True
        if name.endswith("_") and not name.endswith("__"):
            return True
        before = i
    return any(may_change_tensors(constant) for constant in code.co_consts if isinstance(constant, CodeType))


def names_in_code(module: nn.Module) -> set[str]:
    """List attributes and functions named in the methods of a module's class, its constructor apart."""
    return {name for code in codes_of_methods(type(module)) for name in names_in(code)}


@cache
def reads_matrix_of(layer: str, kinds: frozenset[type]) -> bool:
    """Tell whether methods of ``kinds`` read the parameters of what is an attribute ``layer``, beside a call of it."""
    codes = (code for kind in kinds for code in codes_of_methods(kind))
    return any(not {"weight", "bias"}.isdisjoint(attributes_of({layer}, code)) for code in codes)


def codes_of_methods(kind: type) -> Iterator[CodeType]:
    """Walk through the code of all methods of a class, constructors and what it has from torch apart."""
    for base in kind.__mro__:
        if base is object or base.__module__.partition(".")[0] == "torch":
            continue
        for name, method in vars(base).items():
            if inspect.isfunction(method) and name != "__init__":
                yield inspect.unwrap(method).__code__


def reachable_code(functions: Iterable[Callable[..., Any]], owners: Iterable[type]) -> Iterator[CodeType]:
    """Walk through the code of ``functions`` and of what they may call, that of libraries left out.

    A name may be a global of the function's file, or an attribute of any class of ``owners``: more than what runs, and
    not what is called by a name made at run time.

    Args:
        functions: where to begin; what is not written in Python ends there.
        owners: classes whose methods and properties the names may be.
    """
    own = {base for kind in owners for base in kind.__mro__ if not is_of_library(base)}
    waiting: list[Any] = list(functions)
    seen = set()
    while waiting:
        function = _undecorated(waiting.pop())
        if not inspect.isfunction(function) or function.__code__ in seen or is_of_library(function):
            continue
        seen.add(function.__code__)
        yield function.__code__
        names = names_in(function.__code__)
        waiting.append(vars(function).get("__wrapped__"))
        waiting += (vars(kind).get(name) for kind in own for name in names)
        for value in _values_of(function, names):
            waiting += _functions_of(value, names)


def is_of_library(thing: Any) -> bool:
    """Tell whether a function or class comes with Python or with a library that is known, and is not the user's."""
    return all(map(is_of_library_named, (getattr(thing, "__module__", None) or "builtins", place_of(thing))))


def is_of_library_named(module: str) -> bool:
    """Tell the same of the name of a file that is imported."""
    package = module.partition(".")[0]
    return package in LIBRARIES or package in sys.stdlib_module_names


def _undecorated(function: Any) -> Any:
    """Give the function behind decorators, bound methods, properties and partial arguments."""
    while kind := next((kind for kind in _FUNCTION if isinstance(function, kind)), None):
        function = getattr(function, _FUNCTION[kind])
    while inspect.isroutine(function) and not inspect.isfunction(function) and hasattr(function, "__wrapped__"):
        function = function.__wrapped__  # of a cache, which has no code
    return function


_FUNCTION: dict[type, str] = {
    cached_property: "func",
    classmethod: "__func__",
    MethodType: "__func__",
    partial: "func",
    property: "fget",
    staticmethod: "__func__",
}
"""Where each kind of object keeps its function. Others are not asked: an attribute of a mock is a mock."""


def _values_of(function: FunctionType, names: set[str]) -> Iterator[Any]:
    """Yield what a function finds under its names: globals, files that it imports itself, enclosed values, defaults."""
    for name in names:
        yield function.__globals__.get(name)
        yield sys.modules.get(name)
    yield from map(_content, function.__closure__ or ())
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()


def objects_of(things: Iterable[Any]) -> Iterator[Any]:
    """Walk through objects, what they hold as attributes and what their containers hold; not through libraries'."""
    waiting, seen = list(things), set()
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        yield thing
        if isinstance(thing, dict | list | tuple | set):
            values = thing.values() if isinstance(thing, dict) else thing
            waiting += islice(values, _MOST)
        elif isinstance(thing, partial):
            waiting += thing.func, *thing.args, *thing.keywords.values()
        elif not is_of_library(type(thing)):
            waiting += getattr(thing, "__dict__", {}).values()


_MOST = 1000
"""How many values of a container are looked at: functions lie in short ones."""


def _functions_of(value: Any, names: set[str]) -> list[Any]:
    """List what may be called of a global value: itself, what it defines, or what a file named so defines."""
    if isinstance(value, ModuleType):
        if is_of_library_named(value.__name__):
            return []
        found = [vars(value).get(name) for name in names]
        return found + [part for kind in found if isinstance(kind, type) for part in _functions_of(kind, names)]
    if isinstance(value, dict | list | tuple | set):
        return [part for item in objects_of([value]) if inspect.isroutine(item) for part in _functions_of(item, names)]
    if inspect.isroutine(value) or isinstance(value, tuple(_FUNCTION)):
        return [value]
    kind = value if isinstance(value, type) else type(value)
    return [] if is_of_library(kind) else list(vars(kind).values())


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None
