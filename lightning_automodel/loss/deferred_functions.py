"""Functions of torch on logits that were not computed: kept for later, or what a loss without logits gives.

A function here is called with recipes in the place of the logits, and returns a recipe, or a loss. ``NotImplemented``:
this call needs logits.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from lightning_automodel._compat.torch.pytree import tree_leaves, tree_map
from lightning_automodel.distributed.collectives import copy_in
from lightning_automodel.loss.cut_logits import MOVES, POINTWISE, cross_entropy_by
from lightning_automodel.loss.functional import count_targets
from lightning_automodel.loss.linear_recipe import LinearRecipe, Operation


def _cross_entropy(
    logits: LinearRecipe, target: Tensor, ignore_index: int, reduction: str, label_smoothing: float
) -> Any:
    if reduction not in ("mean", "sum"):
        return NotImplemented
    total = logits.loss_sum(target, ignore_index, label_smoothing)
    return total if reduction == "sum" else total / count_targets(target, ignore_index)  # 0 where no label counts


def _getitem(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Pick positions, or the first ids, ``logits[..., :n]``: what follows only pads the vocabulary."""
    logits, key = args
    limit = _limit_of(key, logits.local.ndim) if isinstance(logits, LinearRecipe) and logits.is_at(-1) else None
    if limit is None:
        return MOVES["__getitem__"](func, args, kwargs)
    width = max(0, limit - logits.shard.start)
    return logits.followed_by(lambda x: x[..., :width], size=min(limit, logits.size))


def _limit_of(key: Any, ndim: int) -> int | None:
    if not isinstance(key, tuple):
        return None
    *rest, last = key
    whole = all(index is Ellipsis or (isinstance(index, slice) and index == slice(None)) for index in rest)
    is_of_ids = whole and (Ellipsis in rest or len(key) == ndim)
    first = is_of_ids and isinstance(last, slice) and last.start is None and last.step is None
    return last.stop if first and isinstance(last.stop, int) and last.stop >= 0 else None


def _pointwise(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Keep an elementwise function, perhaps beside constants: one for all logits, or one for each id."""
    leaves = tree_leaves((args, kwargs))
    logits = next(x for x in leaves if isinstance(x, LinearRecipe))
    others = [x for x in leaves if isinstance(x, Tensor)]
    is_alone = sum(isinstance(x, LinearRecipe) for x in leaves) == 1 and kwargs.get("out") is None
    if not is_alone or any(x.requires_grad or not (x.numel() == 1 or _is_of_ids(x, logits)) for x in others):
        return NotImplemented
    empty = logits.local.new_empty((0, logits.size), dtype=logits.dtype)
    result = _repeat(func, args, kwargs, 0)(empty)
    if not isinstance(result, Tensor) or result.shape != empty.shape or result.device != empty.device:
        return NotImplemented
    return logits.followed_by(_repeat(func, args, kwargs, logits.shard.start), dtype=result.dtype)


def _is_of_ids(value: Tensor, logits: LinearRecipe) -> bool:
    return logits.is_at(-1) and value.shape[-1:] == (logits.size,) and value.numel() == logits.size


def _add(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Take a bias for each id that learns as one of the head; add constants as any elementwise function."""
    logits, bias = args if len(args) == 2 and not kwargs else (None, None)
    if not isinstance(logits, LinearRecipe) or not isinstance(bias, Tensor) or not bias.requires_grad:
        return _pointwise(func, args, kwargs)
    if logits.operations or not _is_of_ids(bias, logits) or bias.dtype != logits.dtype:
        return NotImplemented
    group, rows = logits.shard.group, logits.weight.shape[0]
    part = (copy_in(bias, group) if group else bias).flatten().narrow(0, logits.shard.start, rows)
    return replace(logits, bias=part if logits.bias is None else logits.bias + part)


class _Place:
    """Marks where the logits go. The place is kept and not the logits: they hold the hidden states of one step."""


def _repeat(func: Callable, args: tuple, kwargs: dict[str, Any], start: int) -> Operation:
    """Calls ``func`` with the same operands, but [chunk, width] logits, of the ids from ``start`` on, in the place of
    those that were not computed.
    """
    args, kwargs = tree_map(_kept, (args, kwargs))

    def repeat(logits: Tensor) -> Tensor:
        def beside(value: Any) -> Any:
            if value is _Place:
                return logits
            is_of_ids = isinstance(value, Tensor) and value.numel() > 1
            return value[start:][: logits.shape[-1]] if is_of_ids else value  # none, where others hold the first ids

        operands, named = tree_map(beside, (args, kwargs))
        return func(*operands, **named)

    return repeat


def _kept(value: Any) -> Any:
    if isinstance(value, LinearRecipe):
        return _Place
    return value.flatten() if isinstance(value, Tensor) and value.ndim else value


FUNCTIONS: dict[str, Callable[[Callable, tuple, dict[str, Any]], Any]] = {
    "cross_entropy": cross_entropy_by(_cross_entropy),
    **MOVES,
    "__getitem__": _getitem,
    **dict.fromkeys(POINTWISE, _pointwise),
    **dict.fromkeys(("add", "__add__"), _add),
}
"""By the name of torch's function."""
