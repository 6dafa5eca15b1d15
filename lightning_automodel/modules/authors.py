"""Whose code a function runs: ``functools.wraps`` copies the names of what is wrapped, so each link is asked.

::

    @functools.wraps(theirs)                    __module__      stands in (__globals__)
    def mine(...): return theirs(...)
                        mine                    theirs          mine
                        mine.__wrapped__        theirs          theirs
    torch.no_grad()(mine)                       mine            torch
                        .__wrapped__            mine            mine
"""

import functools
import inspect
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any

from torch import nn


def place_of(thing: Any) -> str:
    """Name the module of Python in which the code of a function or class stands, or the class of an object."""
    if isinstance(thing, FunctionType):
        return thing.__globals__.get("__name__") or "__main__"
    if not inspect.isroutine(thing) and not isinstance(thing, type):
        thing = type(thing)
    return getattr(thing, "__module__", None) or "builtins"


def links_of(function: Any) -> Iterator[Any]:
    """Walk through a function, what decorators have put it around, and what holds it: functions, classes, objects.

    From the outside to the inside; of a partial function the function and those that it is given, of a bound method
    the function and what it is bound to, modules apart.
    """
    waiting, seen = [function], set()
    while waiting:
        link = waiting.pop(0)
        if id(link) in seen:
            continue
        seen.add(id(link))
        inner = getattr(link, "__dict__", {}).get("__wrapped__")
        if isinstance(link, functools.partial):
            given = (*link.args, *link.keywords.values())
            waiting[:0] = [link.func, *(value for value in given if inspect.isroutine(value))]
        elif isinstance(link, MethodType):
            owner = link.__self__
            waiting[:0] = [link.__func__, *([] if isinstance(owner, nn.Module) else [_class_of(owner)])]
        elif isinstance(link, staticmethod | classmethod):
            waiting[:0] = [link.__func__]
        else:
            yield link
        if inner is not None:
            waiting.append(inner)


def _class_of(owner: Any) -> type:
    return owner if isinstance(owner, type) else type(owner)
