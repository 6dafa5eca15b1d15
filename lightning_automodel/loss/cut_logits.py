"""Logits in whose vocabulary's place something else stands, and functions of torch that move their other dimensions.

::

    logits [batch, seq, vocab]     a rank's shard [batch, seq, vocab / tp]        logit_shard.py
                                   hidden states  [batch, seq, hidden]            linear_recipe.py

A function here is called with either of them in the place of the logits, and returns what torch's would, in that place.
``NotImplemented``: not every one of its logits is in one place.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from lightning_automodel._compat.torch.pytree import tree_leaves
from lightning_automodel.loss.functional import IGNORE_INDEX

Function = Callable[..., Any]


@dataclass(frozen=True)
class CutLogits:
    """Logits of which ``local`` has something else in the place of the vocabulary.

    Attributes:
        local: as the logits in all other dimensions.
        dim: where the logits have the vocabulary.
        size: of the vocabulary.
    """

    local: Tensor
    dim: int
    size: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the logits."""
        return (*self.local.shape[: self.dim], self.size, *self.local.shape[self.dim + 1 :])

    def is_at(self, dim: Any) -> bool:
        """Tells whether ``dim`` is that of the vocabulary."""
        return isinstance(dim, int) and dim % self.local.ndim == self.dim

    def last(self) -> Tensor:
        """Returns what stands in the place of the logits with the vocabulary's dimension last."""
        return self.local.movedim(self.dim, -1)

    def with_last(self, local: Tensor) -> Self:
        """Put something back into the place of these, from a tensor with the vocabulary's dimension last."""
        return replace(self, local=local.movedim(-1, self.dim))


def bound(function: Function) -> Function:
    """Make a function of logits take torch's arguments by name; a call that does not fit is ``NotImplemented``."""
    signature = inspect.signature(function)

    def call(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        given = {("logits" if k in ("input", "self") else k): v for k, v in kwargs.items()}
        try:
            bound = signature.bind(*args, **given)
        except TypeError:
            return NotImplemented
        others = (v for k, v in bound.arguments.items() if k != "logits")
        if not isinstance(bound.arguments["logits"], CutLogits) or any(
            isinstance(x, CutLogits) for x in tree_leaves(list(others))
        ):
            return NotImplemented
        return function(**bound.arguments)

    return call


def cross_entropy_by(compute: Function) -> Function:
    """Make ``compute(logits, target, ignore_index, reduction, label_smoothing)`` torch's cross entropy of class ids."""

    def cross_entropy(
        logits: CutLogits,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = IGNORE_INDEX,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Any:
        if target.is_floating_point() or not is_plain_loss(logits, weight, size_average, reduce):
            return NotImplemented
        if target.shape != logits.last().shape[:-1]:
            raise ValueError(f"targets {list(target.shape)} do not fit to logits {list(logits.shape)}")
        return compute(logits, target, ignore_index, reduction, label_smoothing)

    return bound(cross_entropy)


def is_plain_loss(logits: CutLogits, *rare: Any) -> bool:
    """Tell whether the vocabulary stands where torch's losses expect it, and no rare argument is given."""
    return all(x is None for x in rare) and logits.dim == (1 if logits.local.ndim > 1 else 0)


def _views(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Move and pick along other dimensions; a trial on two vocabularies without elements shows where theirs goes."""
    if not isinstance(args[0], CutLogits) or any(
        isinstance(x, Tensor | CutLogits) for x in tree_leaves((args[1:], kwargs))
    ):
        return NotImplemented
    logits = args[0]
    size = 1 + 2 * max(logits.shape)
    probes = [func(_probe(logits, n), *args[1:], **kwargs).shape for n in (size, size + 1)]
    moved = [d for d, (one, other) in enumerate(zip(*probes, strict=True)) if one != other]
    if len(moved) != 1 or (probes[0][moved[0]], probes[1][moved[0]]) != (size, size + 1):
        return NotImplemented
    local = func(logits.local, *args[1:], **kwargs)
    is_alike = local.ndim == len(probes[0]) and local.shape[moved[0]] == logits.local.shape[logits.dim]
    return replace(logits, local=local, dim=moved[0]) if is_alike else NotImplemented


def _probe(logits: CutLogits, size: int) -> Tensor:
    shape = (*logits.local.shape[: logits.dim], size, *logits.local.shape[logits.dim + 1 :])
    return torch.empty(shape, device="meta")


def _reshape(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Reshape the dimensions before a vocabulary that stays the last."""
    logits = args[0] if args else None
    is_whole = any(isinstance(x, torch.dtype | Tensor) for x in tree_leaves((args[1:], kwargs)))
    if not isinstance(logits, CutLogits) or is_whole or logits.dim != logits.local.ndim - 1:
        return NotImplemented
    shape = func(torch.empty(logits.shape, device="meta"), *args[1:], **kwargs).shape
    if not shape or shape[-1] != logits.size or logits.size == 0:
        return NotImplemented
    local = logits.local.reshape(*shape[:-1], logits.local.shape[-1])
    return replace(logits, local=local, dim=len(shape) - 1)


def _view_as(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Give logits that are viewed as they are, which autograd does where a function of somebody's returns its input."""
    logits, other = (*args, *kwargs.values())
    if not isinstance(logits, CutLogits) or tuple(other.shape) != logits.shape:
        return NotImplemented
    return replace(logits, local=logits.local.view_as(logits.local))


def _getitem(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Index dimensions other than the vocabulary, which is the last and stays so."""
    logits, key = args
    keys = key if isinstance(key, tuple) else (key,)
    known = (int, slice, type(None), type(Ellipsis), Tensor)
    if not isinstance(logits, CutLogits) or not all(isinstance(k, known) for k in keys):
        return NotImplemented
    if Ellipsis in [k for k in keys if not isinstance(k, Tensor)]:
        at = next(i for i, k in enumerate(keys) if k is Ellipsis)
        is_free = not keys[at + 1 :] or _is_all(keys[-1])
    else:
        used = sum(_dims_of(k) for k in keys)
        is_free = used < logits.local.ndim or _is_all(keys[-1])
    if not is_free or logits.dim != logits.local.ndim - 1:
        return NotImplemented
    local = func(logits.local, key)
    return replace(logits, local=local, dim=local.ndim - 1)


def _is_all(key: Any) -> bool:
    return isinstance(key, slice) and key == slice(None)


def _dims_of(key: Any) -> int:
    """Count the dimensions that one part of an index takes."""
    if isinstance(key, Tensor) and key.dtype in (torch.bool, torch.uint8):
        return key.ndim
    return 0 if key is None else 1


MOVES: dict[str, Callable[[Callable, tuple, dict[str, Any]], Any]] = {
    "__getitem__": _getitem,
    **dict.fromkeys(("view", "reshape", "flatten"), _reshape),
    "view_as": _view_as,
    **dict.fromkeys(
        ("mT", "transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "unsqueeze", "squeeze"), _views
    ),
    **dict.fromkeys(("narrow", "select"), _views),
}
"""By the name of torch's function."""

POINTWISE = {
    *("float", "double", "half", "bfloat16", "to", "type", "contiguous", "clone"),
    *("add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "neg", "negative", "clamp"),
    *("tanh", "exp", "sigmoid", "abs", "square", "sqrt", "log", "log1p"),
    *(f"__{prefix}{name}__" for name in ("add", "sub", "mul", "truediv") for prefix in ("", "r")),
    *("__neg__", "__abs__"),
}
"""Functions of torch that treat each logit alone, by name."""
