"""Functions of torch on logits of which each rank holds a shard of the vocabulary, without whole ones.

A function here is called with the shards in the place of the logits, and returns what torch's would: plain tensors, or
shards. ``NotImplemented``: this call needs whole logits.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_automodel._compat.torch.pytree import tree_leaves, tree_map, tree_map_only
from lightning_automodel.distributed.collectives import copy_in
from lightning_automodel.loss.functional import IGNORE_INDEX
from lightning_automodel.loss.logit_shard import LogitShard
from lightning_automodel.loss.vocab_parallel import VocabShard, check_targets, token_losses, wide

Function = Callable[..., Any]


def _bound(function: Function) -> Function:
    """Make a function take torch's arguments by name; a call that does not fit its signature needs whole logits."""
    signature = inspect.signature(function)

    def call(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        given = {("logits" if k in ("input", "self") else k): v for k, v in kwargs.items()}
        try:
            bound = signature.bind(*args, **given)
        except TypeError:
            return NotImplemented
        others = (v for k, v in bound.arguments.items() if k != "logits")
        if not isinstance(bound.arguments["logits"], LogitShard) or any(
            isinstance(x, LogitShard) for x in tree_leaves(list(others))
        ):
            return NotImplemented
        return function(**bound.arguments)

    return call


# ---- a number or a few from each row ---------------------------------------------------------------------------------


def _argmax(logits: LogitShard, dim: Any = None, keepdim: bool = False) -> Any:
    found = _max(logits, dim, keepdim)
    return found if found is NotImplemented else found.indices


def _max(logits: LogitShard, dim: Any = None, keepdim: bool = False) -> Any:
    if not logits.is_at(dim) or logits.narrowest < 1:
        return NotImplemented
    values, columns = logits.last().detach().max(-1, keepdim=True)
    best = logits.collect(values).argmax(-1, keepdim=True)  # the first among equals, as in torch
    ids = logits.collect(columns + logits.start).gather(-1, best)
    return _found(logits, ids, torch.return_types.max, keepdim)


def _topk(logits: LogitShard, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    if not logits.is_at(dim) or k > logits.narrowest:
        return NotImplemented
    values, columns = logits.last().detach().topk(k, largest=largest)
    best = logits.collect(values).topk(k, largest=largest).indices
    ids = logits.collect(columns + logits.start).gather(-1, best)
    return _found(logits, ids, torch.return_types.topk, True)


def _found(logits: LogitShard, ids: Tensor, kind: Any, keepdim: bool) -> Any:
    values, ids = (x.movedim(-1, logits.dim) for x in (logits.pick(ids), ids))
    return kind((values, ids) if keepdim else (values.squeeze(logits.dim), ids.squeeze(logits.dim)))


def _gather(logits: LogitShard, dim: int, index: Tensor, sparse_grad: bool = False) -> Any:
    if not logits.is_at(dim) or index.ndim != logits.local.ndim or index.numel() == 0:
        return NotImplemented
    ids = index.movedim(logits.dim, -1)
    check_targets(ids, logits.size, None)
    rows = tuple(slice(n) for n in ids.shape[:-1])
    return logits.with_last(logits.last()[rows]).pick(ids).movedim(-1, logits.dim)


def _logsumexp(logits: LogitShard, dim: Any, keepdim: bool = False) -> Any:
    if not logits.is_at(dim):
        return NotImplemented
    largest, rest = logits.log_sum(logits.last().to(wide(logits.local)))
    result = (largest + rest).to(logits.local.dtype).movedim(-1, logits.dim)
    return result if keepdim else result.squeeze(logits.dim)


# ---- losses and their parts ------------------------------------------------------------------------------------------


def _log_softmax(logits: LogitShard, dim: Any = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Any:
    if isinstance(_stacklevel, torch.dtype):  # Tensor.log_softmax(dim, dtype)
        dtype = _stacklevel
    if not logits.is_at(dim):
        return NotImplemented
    dtype = dtype or logits.local.dtype
    values = logits.last().to(torch.promote_types(dtype, wide(logits.local)))
    largest, rest = logits.log_sum(values)
    return logits.with_last((values - largest - copy_in(rest, logits.mesh.get_group())).to(dtype))


def _softmax(logits: LogitShard, dim: Any = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Any:
    if isinstance(_stacklevel, torch.dtype):
        dtype = _stacklevel
    dtype = dtype or logits.local.dtype
    logs = _log_softmax(logits, dim, dtype=torch.promote_types(dtype, wide(logits.local)))
    return logs if logs is NotImplemented else replace(logs, local=logs.local.exp().to(dtype))


def _cross_entropy(
    logits: LogitShard,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = IGNORE_INDEX,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Compute torch's cross entropy; ``logits`` is [tokens, vocab], or [batch, vocab, ...]."""
    if target.is_floating_point() or not _is_plain(logits, weight, size_average, reduce):
        return NotImplemented
    shard = VocabShard(logits.size, logits.start, logits.mesh.get_group())
    local, flat = logits.last(), target.reshape(-1)
    if target.shape != local.shape[:-1]:
        raise ValueError(f"targets {list(target.shape)} do not fit to logits {list(logits.shape)}")
    losses = token_losses(local.reshape(-1, local.shape[-1]), flat, shard, ignore_index, label_smoothing)
    counts = target != ignore_index
    if reduction == "mean":
        return losses.sum() / counts.sum().clamp(min=1)  # 0 and not NaN where no label counts, as everywhere here
    return _reduced(losses.view(target.shape), counts, reduction)


def _nll_loss(
    logits: LogitShard,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = IGNORE_INDEX,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    if not _is_plain(logits, weight, size_average, reduce):
        return NotImplemented
    check_targets(target, logits.size, ignore_index)
    counts = target != ignore_index
    picked = logits.pick(target.masked_fill(~counts, 0).unsqueeze(-1)).squeeze(-1)
    return _reduced((-picked).masked_fill(~counts, 0), counts, reduction)


def _is_plain(logits: LogitShard, *rare: Any) -> bool:
    """Tell whether the vocabulary stands where torch's losses expect it, and no rare argument is given."""
    return all(x is None for x in rare) and logits.dim == (1 if logits.local.ndim > 1 else 0)


def _reduced(losses: Tensor, counts: Tensor, reduction: str) -> Any:
    if reduction == "none":
        return losses
    if reduction not in ("mean", "sum"):
        return NotImplemented
    return losses.sum() / counts.sum() if reduction == "mean" else losses.sum()


# ---- what the shards alone give --------------------------------------------------------------------------------------


def _pointwise(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Apply an elementwise function to each rank's shard, perhaps beside numbers that are the same for every logit."""
    leaves = tree_leaves((args, kwargs))
    like = next(x for x in leaves if isinstance(x, LogitShard))
    if not all(_fits(x, like) for x in leaves if isinstance(x, LogitShard | Tensor)):
        return NotImplemented
    group = like.mesh.get_group()
    args, kwargs = tree_map(lambda x: copy_in(x, group) if isinstance(x, Tensor) else _local(x), (args, kwargs))
    result = func(*args, **kwargs)
    return tree_map_only(Tensor, lambda local: replace(like, local=local), result)  # torch 2.15: one for each of a list


def _local(value: Any) -> Any:
    return value.local if isinstance(value, LogitShard) else value


def _views(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Move and pick along other dimensions; a trial on two vocabularies without elements shows where theirs goes."""
    if not isinstance(args[0], LogitShard) or any(
        isinstance(x, Tensor | LogitShard) for x in tree_leaves((args[1:], kwargs))
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


def _probe(logits: LogitShard, size: int) -> Tensor:
    shape = (*logits.local.shape[: logits.dim], size, *logits.local.shape[logits.dim + 1 :])
    return torch.empty(shape, device="meta")


def _reshape(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Reshape the dimensions before a vocabulary that stays the last."""
    logits = args[0] if args else None
    is_whole = any(isinstance(x, torch.dtype | Tensor) for x in tree_leaves((args[1:], kwargs)))
    if not isinstance(logits, LogitShard) or is_whole or logits.dim != logits.local.ndim - 1:
        return NotImplemented
    shape = func(torch.empty(logits.shape, device="meta"), *args[1:], **kwargs).shape
    if not shape or shape[-1] != logits.size or shape.numel() == 0:
        return NotImplemented
    local = logits.local.reshape(*shape[:-1], logits.local.shape[-1])
    return replace(logits, local=local, dim=len(shape) - 1)


def _view_as(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Give logits that are viewed as they are, which autograd does where a function of somebody's returns its input."""
    logits, other = (*args, *kwargs.values())
    if not isinstance(logits, LogitShard) or tuple(other.shape) != logits.shape:
        return NotImplemented
    return replace(logits, local=logits.local.view_as(logits.local))


def _getitem(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Index dimensions other than the vocabulary, which is the last and stays so."""
    logits, key = args
    keys = key if isinstance(key, tuple) else (key,)
    known = (int, slice, type(None), type(Ellipsis), Tensor)
    if not isinstance(logits, LogitShard) or not all(isinstance(k, known) for k in keys):
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


def _fits(value: Any, like: LogitShard) -> bool:
    """Tell whether ``value`` is cut as ``like``, or the same for the whole vocabulary."""
    if isinstance(value, LogitShard):
        return value.shape == like.shape and value.dim == like.dim and value.mesh == like.mesh
    missing = like.local.ndim - value.ndim
    sizes = zip(value.shape, like.shape[max(missing, 0) :], strict=False)
    return missing >= 0 and all(
        one == 1 or (one == other and i + missing != like.dim) for i, (one, other) in enumerate(sizes)
    )


_POINTWISE = {
    *("float", "double", "half", "bfloat16", "to", "type", "contiguous", "clone", "detach", "alias"),
    *("add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "neg", "negative", "clamp"),
    *("tanh", "exp", "sigmoid", "abs", "square", "sqrt", "log", "log1p"),
    *(f"__{prefix}{name}__" for name in ("add", "sub", "mul", "truediv") for prefix in ("", "r")),
    *("__neg__", "__abs__"),
}
_MOVES = (
    "mT",
    "transpose",
    "swapaxes",
    "swapdims",
    "permute",
    "movedim",
    "moveaxis",
    "unsqueeze",
    "squeeze",
    "narrow",
    "select",
)

FUNCTIONS: dict[str, Callable[[Callable, tuple, dict[str, Any]], Any]] = {
    "argmax": _bound(_argmax),
    "max": _bound(_max),
    "topk": _bound(_topk),
    "gather": _bound(_gather),
    "logsumexp": _bound(_logsumexp),
    "log_softmax": _bound(_log_softmax),
    "softmax": _bound(_softmax),
    "cross_entropy": _bound(_cross_entropy),
    "nll_loss": _bound(_nll_loss),
    "__getitem__": _getitem,
    **dict.fromkeys(("view", "reshape", "flatten"), _reshape),
    "view_as": _view_as,
    **dict.fromkeys(_MOVES, _views),
    **dict.fromkeys(_POINTWISE, _pointwise),
}
"""By the name of torch's function."""
