"""Functions of torch on logits of which each rank holds a shard of the vocabulary, without whole ones.

A function here is called with the shards in the place of the logits, and returns what torch's would: plain tensors, or
shards. ``NotImplemented``: this call needs whole logits.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lightning_automodel._compat.torch.pytree import tree_leaves, tree_map, tree_map_only
from lightning_automodel.distributed.collectives import copy_in
from lightning_automodel.loss.cut_logits import MOVES, POINTWISE, bound, cross_entropy_by, is_plain_loss
from lightning_automodel.loss.functional import IGNORE_INDEX, count_targets
from lightning_automodel.loss.logit_shard import LogitShard
from lightning_automodel.loss.vocab_parallel import VocabShard, check_targets, token_losses, wide

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
    result = (largest + rest).to(_dtype_of(torch.logsumexp, logits)).movedim(-1, logits.dim)
    return result if keepdim else result.squeeze(logits.dim)


# ---- losses and their parts ------------------------------------------------------------------------------------------


def _log_softmax(logits: LogitShard, dim: Any = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Any:
    if isinstance(_stacklevel, torch.dtype):  # Tensor.log_softmax(dim, dtype)
        dtype = _stacklevel
    if not logits.is_at(dim):
        return NotImplemented
    dtype = dtype or _dtype_of(torch.log_softmax, logits)
    values = logits.last().to(torch.promote_types(dtype, wide(logits.local)))
    largest, rest = logits.log_sum(values)
    return logits.with_last((values - largest - copy_in(rest, logits.mesh.get_group())).to(dtype))


def _softmax(logits: LogitShard, dim: Any = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Any:
    if isinstance(_stacklevel, torch.dtype):
        dtype = _stacklevel
    dtype = dtype or _dtype_of(torch.softmax, logits)
    logs = _log_softmax(logits, dim, dtype=torch.promote_types(dtype, wide(logits.local)))
    return logs if logs is NotImplemented else replace(logs, local=logs.local.exp().to(dtype))


def _cross_entropy(
    logits: LogitShard, target: Tensor, ignore_index: int, reduction: str, label_smoothing: float
) -> Any:
    shard = VocabShard(logits.size, logits.start, logits.mesh.get_group())
    local = logits.last().reshape(-1, logits.local.shape[logits.dim])
    losses = token_losses(local, target.reshape(-1), shard, ignore_index, label_smoothing)
    if reduction == "mean":
        return losses.sum() / count_targets(target, ignore_index)  # 0 and not NaN where no label counts
    return _reduced(losses.view(target.shape), target != ignore_index, reduction)


def _nll_loss(
    logits: LogitShard,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = IGNORE_INDEX,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Any:
    if not is_plain_loss(logits, weight, size_average, reduce):
        return NotImplemented
    check_targets(target, logits.size, ignore_index)
    counts = target != ignore_index
    picked = logits.pick(target.masked_fill(~counts, 0).unsqueeze(-1)).squeeze(-1)
    picked = picked.to(_dtype_of(functional.nll_loss, logits, target.new_zeros(1)))
    return _reduced((-picked).masked_fill(~counts, 0), counts, reduction)


def _dtype_of(function: Callable, logits: LogitShard, argument: Any = -1) -> torch.dtype:
    """Find the dtype of what ``function`` of torch gives, which is wider than the logits' in some of them under
    autocast.
    """
    local = logits.local
    is_cast = torch.is_autocast_enabled(local.device.type)
    return function(local.new_zeros(1, 1), argument).dtype if is_cast else local.dtype


def _reduced(losses: Tensor, counts: Tensor, reduction: str) -> Any:
    if reduction == "none":
        return losses
    if reduction not in ("mean", "sum"):
        return NotImplemented
    return losses.sum() / counts.sum() if reduction == "mean" else losses.sum()


# ---- what the shards alone give --------------------------------------------------------------------------------------


def _pointwise(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Apply an elementwise function to each rank's shard, perhaps beside numbers, or its part of a whole tensor."""
    leaves = tree_leaves((args, kwargs))
    like = next(x for x in leaves if isinstance(x, LogitShard))
    if not all(_fits(x, like) for x in leaves if isinstance(x, LogitShard | Tensor)):
        return NotImplemented
    args, kwargs = tree_map(lambda x: _beside(x, like), (args, kwargs))
    result = func(*args, **kwargs)
    return tree_map_only(Tensor, lambda local: replace(like, local=local), result)  # torch 2.15: one for each of a list


def _fits(value: Any, like: LogitShard) -> bool:
    """Tell whether ``value`` is cut as ``like``, or may be broadcast to the whole logits."""
    if isinstance(value, LogitShard):
        return value.shape == like.shape and value.dim == like.dim and value.mesh == like.mesh
    missing = like.local.ndim - value.ndim
    sizes = zip(value.shape, like.shape[max(missing, 0) :], strict=False)
    return missing >= 0 and all(one in (1, other) for one, other in sizes)


def _beside(value: Any, like: LogitShard) -> Any:
    """Returns what of ``value`` stands beside the shard of ``like``: of a whole tensor, the same ids."""
    if isinstance(value, LogitShard):
        return value.local
    if not isinstance(value, Tensor):
        return value
    value, dim = copy_in(value, like.mesh.get_group()), like.dim - like.local.ndim
    is_for_all = value.ndim < -dim or value.shape[dim] == 1
    return value if is_for_all else value.narrow(dim, like.start, like.local.shape[dim])


FUNCTIONS: dict[str, Callable[[Callable, tuple, dict[str, Any]], Any]] = {
    "argmax": bound(_argmax),
    "max": bound(_max),
    "topk": bound(_topk),
    "gather": bound(_gather),
    "logsumexp": bound(_logsumexp),
    "log_softmax": bound(_log_softmax),
    "softmax": bound(_softmax),
    "cross_entropy": cross_entropy_by(_cross_entropy),
    "nll_loss": bound(_nll_loss),
    **MOVES,
    **dict.fromkeys((*POINTWISE, "detach", "alias"), _pointwise),
}
"""By the name of torch's function."""
