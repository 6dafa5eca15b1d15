"""Lets code around a module run around what ``torch.utils.checkpoint`` computes again there, whoever calls it.

A user's block that calls ``checkpoint`` for a part of itself (``from torch.utils.checkpoint import checkpoint``) knows
nothing of what hooks have put in place for its forward pass. torch keeps the function that it will call again in an
object of its own, in both forms; there is no public place for a context around it but an argument of that call.
"""

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

from torch.utils.checkpoint import CheckpointFunction, _CheckpointFrame

Context = Callable[[], AbstractContextManager]
_OWN = __name__.partition(".")[0]
_BETWEEN = (__name__, "torch.utils.checkpoint", "torch.autograd.function")


@functools.cache
def surround_recomputations(context_of: Callable[[FrameType], Context | None]) -> None:
    """Run what is computed again inside of the context that ``context_of`` gave, in the forward pass, for the frame of
    Python that called ``checkpoint``.
    """
    begin, forward = _CheckpointFrame.__init__, CheckpointFunction.forward

    @functools.wraps(begin)
    def begin_in_context(self: _CheckpointFrame, recompute_fn: Callable, *args: Any, **kwargs: Any) -> None:
        begin(self, _inside(recompute_fn, context_of), *args, **kwargs)

    def forward_in_context(ctx: Any, run_function: Callable, preserve_rng_state: bool, *args: Any) -> Any:
        again = _inside(run_function, context_of)
        output = forward(ctx, run_function, preserve_rng_state, *args)
        ctx.run_function = again
        return output

    _CheckpointFrame.__init__ = begin_in_context  # type: ignore[method-assign]
    CheckpointFunction.forward = staticmethod(forward_in_context)  # type: ignore[method-assign]


def _inside(function: Callable, context_of: Callable[[FrameType], Context | None]) -> Callable:
    frame = inspect.currentframe()
    while frame is not None and _file_of(frame) in _BETWEEN:
        frame = frame.f_back
    if frame is None or _file_of(frame).partition(".")[0] == _OWN:  # which gives its contexts itself
        return function
    context = context_of(frame)
    if context is None:
        return function

    def again(*args: Any, **kwargs: Any) -> Any:
        with context():
            return function(*args, **kwargs)

    return again


def _file_of(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "")
