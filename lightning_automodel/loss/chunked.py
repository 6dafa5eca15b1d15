"""Cross entropy from hidden states and the head's weight: logits of one chunk of tokens exist at a time.

The gradients are computed in the forward pass, while a chunk's logits are at hand, as Liger-Kernel does (Hsu et al.
2024): the backward pass only scales them. That costs no matrix product more than the plain path. ::

    for each chunk:   logits = hidden W^T -> operations of the model -> loss, d logits
                      d hidden = d logits W          d W += d logits^T hidden
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from lightning_automodel._compat.torch.tensors import written_output
from lightning_automodel.distributed.collectives import copy_in, shard_bounds
from lightning_automodel.distributed.second_order import refuse_second_order
from lightning_automodel.loss.functional import IGNORE_INDEX, count_targets
from lightning_automodel.loss.passes import Passes
from lightning_automodel.loss.vocab_parallel import (
    SmoothedLoss,
    VocabShard,
    check_smoothing,
    check_targets,
    ignored,
    wide,
)


@dataclass(frozen=True, kw_only=True)
class ChunkOptions:
    """How the loss of each chunk of tokens is computed.

    Attributes:
        chunk_size: tokens whose logits exist at a time.
        shard: which shard of the vocabulary the weight holds.
        transform: operations between the head and the loss, on [chunk, vocab / tp]; ``None``: none.
        ignore_index: value of targets that do not count.
        label_smoothing: share of the target that is spread evenly over the vocabulary.
        gradients: whether a backward pass may follow.
        passes: over a chunk's logits, compiled; ``None``: kernel by kernel.
    """

    chunk_size: int
    shard: VocabShard
    transform: Callable[[Tensor], Tensor] | None = None
    ignore_index: int = IGNORE_INDEX
    label_smoothing: float = 0.0
    gradients: bool = True
    passes: Passes | None = None


def chunked_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    chunk_size: int,
    group: ProcessGroup | None = None,
    vocab_size: int | None = None,
    bias: Tensor | None = None,
    logit_transform: Callable[[Tensor], Tensor] | None = None,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """Computes ``cross_entropy(logit_transform(hidden @ weight.T + bias), labels)`` without holding all logits.

    Args:
        hidden: [tokens, hidden]; equal on all ranks of ``group``.
        weight: [vocab, hidden], or this rank's rows as DTensor cuts them: [vocab / tp, hidden].
        labels: [tokens], ids of the whole vocabulary. Nothing is shifted.
        chunk_size: tokens whose logits exist at a time.
        group: the ranks that hold the rows together; ``None``: ``weight`` is whole.
        vocab_size: rows as a whole, with ``group``.
        bias: [vocab] or [vocab / tp].
        logit_transform: elementwise; differentiable with respect to the logits, not to anything else.
        ignore_index: value of labels that do not count.
        label_smoothing: share of the target that is spread evenly over the vocabulary.
        reduction: "mean" over the labels that count (0 if none does), or "sum".

    Returns:
        a float32 scalar, equal on all ranks of ``group``.

    Raises:
        TypeError: for DTensors: which gradients their ranks hold is not known here.
        ValueError: for an argument that does not fit, or labels outside of the vocabulary.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction={reduction!r} must be mean or sum: single tokens have no gradients of their own")
    for name, value in (("hidden", hidden), ("weight", weight), ("labels", labels), ("bias", bias)):
        if isinstance(value, DTensor):
            raise TypeError(_give_local(name, value))
    if group is not None:
        _check_rows(weight, group, vocab_size)
    options = ChunkOptions(
        chunk_size=chunk_size,
        shard=VocabShard.of(vocab_size or weight.shape[0], group),
        transform=logit_transform,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    )
    total = chunked_loss_sum(copy_in(hidden, group) if group else hidden, weight, bias, labels, options)
    return total if reduction == "sum" else total / count_targets(labels, ignore_index)


def chunked_loss_sum(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: ChunkOptions
) -> Tensor:
    """Sums the losses of ``targets`` [tokens]; gradients of ``hidden`` are this rank's term of a sum.

    Raises:
        ValueError: if an argument does not fit, or targets are outside of the vocabulary.
    """
    _check_shapes(hidden, weight, targets, options.chunk_size)
    check_targets(targets, options.shard.size, options.ignore_index)
    check_smoothing(options.label_smoothing)
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    if hidden.dtype != weight.dtype:
        raise ValueError(
            f"hidden is {hidden.dtype} and weight is {weight.dtype}; cast one of them, or use torch.autocast"
        )
    with torch.autocast(kind, enabled=False):
        return _ChunkedLossSum.apply(hidden, weight, bias, targets, options)


def _give_local(name: str, value: DTensor) -> str:
    return (
        f"{name} is a DTensor {list(value.shape)} with the placements {value.placements}; give what this rank computes "
        f"with: {name}.full_tensor(), or for the rows of a weight or bias over tp {name}.to_local() with "
        f"group=axis(mesh, TP).get_group() and vocab_size={value.shape[0]}"
    )


def _check_rows(weight: Tensor, group: ProcessGroup, vocab_size: int | None) -> None:
    if vocab_size is None:
        raise ValueError("with group, weight is a shard: give vocab_size, the rows of the whole weight")
    _, rows = shard_bounds(vocab_size, group.size(), group.rank())
    if weight.shape[0] != rows:
        raise ValueError(
            f"weight has {weight.shape[0]} rows, but DTensor gives rank {group.rank()} of {group.size()} {rows} of "
            f"vocab_size={vocab_size}; cut it that way: distribute_tensor(weight, mesh, [Shard(0)]).to_local()"
        )


def _check_shapes(hidden: Tensor, weight: Tensor, targets: Tensor, chunk_size: int) -> None:
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size} must be at least 1 token")
    if hidden.ndim != 2 or targets.ndim != 1:
        raise ValueError(
            f"hidden {list(hidden.shape)} and labels {list(targets.shape)} must be [tokens, hidden] and [tokens]; "
            "flatten them: hidden.flatten(0, -2), labels.flatten()"
        )
    if hidden.shape[0] != targets.shape[0]:
        raise ValueError(f"{hidden.shape[0]} hidden states have {targets.shape[0]} labels; give one for each")
    if hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden {list(hidden.shape)} does not fit to weight {list(weight.shape)}, which is [vocab, hidden]"
        )


_ONCE = (
    "a loss in chunks gives its gradients to one backward pass, and another one came before it (retain_graph=True, or "
    "torch.autograd.grad of the loss). Call the model once for each, or use chunked_loss=None"
)


class _ChunkedLossSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: ChunkOptions
    ) -> Tensor:
        needed = [options.gradients and need for need in ctx.needs_input_grad[:3]]
        # Many small terms are added to these two, so they are wide; the gradient of a token is written once.
        d_hidden = torch.empty_like(hidden) if needed[0] else None
        d_weight = torch.zeros_like(weight, dtype=wide(weight)) if needed[1] else None
        d_bias = torch.zeros_like(bias, dtype=wide(bias)) if needed[2] and bias is not None else None
        total = hidden.new_zeros((), dtype=wide(hidden))
        for start in range(0, hidden.shape[0], options.chunk_size):
            rows = slice(start, start + options.chunk_size)
            logits = torch.nn.functional.linear(hidden[rows], weight, bias)
            loss, d_logits = _loss_and_gradient(logits, targets[rows], options, any(needed))
            total += loss
            if d_hidden is not None:
                torch.mm(d_logits, weight, out=d_hidden[rows])
            if d_weight is not None:
                _add_product(d_weight, d_logits.T, hidden[rows])
            if d_bias is not None:
                d_bias += d_logits.sum(0)
            del logits, d_logits  # before the next chunk's are made
        ctx.save_for_backward(d_hidden, d_weight, d_bias)
        ctx.dtypes = [hidden.dtype, weight.dtype, weight.dtype]
        return written_output(total)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_order("a loss in chunks", "use torch's cross_entropy (chunked_loss=None)")
        # In place, because a second array of the weight's size is what this saves. A second backward pass through the
        # same graph fails: autograd sees that what was saved has changed.
        try:
            saved = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        except RuntimeError as error:
            raise RuntimeError(f"{_ONCE}. torch says: {error}") from error
        return *(None if value is None else value.mul_(grad).to(dtype) for value, dtype in saved), None, None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Computes ``total += left @ right``, where the total may be wider."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda and not torch.compiler.is_compiling():  # the product alone would be rounded, and written
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


def _loss_and_gradient(
    logits: Tensor, targets: Tensor, options: ChunkOptions, gradients: bool
) -> tuple[Tensor, Tensor]:
    """Loss sum of one chunk, and its gradient with respect to ``logits`` [chunk, vocab / tp], which are overwritten."""
    if options.transform is None:
        loss, d_logits = _softmax_loss(logits, targets, options, gradients, overwrite=True)
        return loss, d_logits.to(logits.dtype)
    with torch.set_grad_enabled(gradients):
        logits.requires_grad_(gradients)
        transformed = options.transform(logits)
    loss, d_transformed = _softmax_loss(transformed.detach(), targets, options, gradients, overwrite=False)
    if not gradients:
        return loss, d_transformed
    (d_logits,) = torch.autograd.grad(transformed, logits, d_transformed.to(transformed.dtype))
    return loss, d_logits


def _softmax_loss(
    logits: Tensor, targets: Tensor, options: ChunkOptions, gradients: bool, overwrite: bool
) -> tuple[Tensor, Tensor]:
    rule = SmoothedLoss(options.shard, options.label_smoothing, options.passes)
    maximum, sums = rule.start(logits, targets)
    counts = (~ignored(targets, options.ignore_index)).to(maximum.dtype)
    if rule.passes_over(logits) is not None:
        rule.add_up(logits, maximum, sums)
        options.shard.reduce(sums)
        values = logits if overwrite else torch.empty_like(logits)
        if gradients:
            rule.write_gradient(logits, targets, maximum, sums[0], counts, values)
    else:
        overwrite = overwrite and logits.dtype == maximum.dtype
        values = logits.sub_(maximum[:, None]) if overwrite else logits - maximum[:, None]
        rule.exponentiate(values, sums)
        options.shard.reduce(sums)
        if gradients:
            rule.differentiate(values, targets, sums[0], counts)
    return rule.losses(sums).masked_fill_(counts == 0, 0).sum(), values
