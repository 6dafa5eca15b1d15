"""Defers logits: keeps what would give them, and what the model does with them on the way to its loss."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_automodel.loss.chunked import ChunkOptions, chunked_loss_sum
from lightning_automodel.loss.kernels import fused_loss_sum
from lightning_automodel.loss.passes import Passes
from lightning_automodel.loss.vocab_parallel import VocabShard

_ELEMENTWISE = {
    *("add", "sub", "mul", "div", "true_divide", "tanh", "float", "to", "type", "contiguous", "clone", "clamp"),
    *("__add__", "__radd__", "__sub__", "__mul__", "__rmul__", "__truediv__"),
}
"""Functions of torch that may stand between head and loss, by name: they treat each logit alone."""


@dataclass(frozen=True, kw_only=True)
class LinearRecipe:
    """How deferred logits would be computed: a linear head, and the operations behind it.

    Attributes:
        hidden: [batch, seq, hidden].
        weight: [vocab / tp, hidden].
        bias: [vocab / tp].
        shard: which shard of the vocabulary these are.
        chunk_size: tokens whose logits exist at a time.
        kernel: what computes the loss: "torch", or the name of a library.
        passes: of "torch" over a chunk's logits, compiled.
        owner: name of the model's class, for messages.
        operations: what the model did with the logits, in order.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    shard: VocabShard
    chunk_size: int
    kernel: str
    passes: Passes | None = None
    owner: str
    operations: tuple[Callable[[Tensor], Tensor], ...] = ()


class DeferredLogits(Tensor):
    """Stands for logits [batch, seq, vocab] between a head and the loss; as a tensor it is [batch, 0, vocab].

    It has no element, so the model's own code (scaling, soft-capping, casts) runs on it at no cost, and is recorded for
    :meth:`loss_sum` to repeat on each chunk. Whatever looks at more than one logit is refused.
    """

    recipe: LinearRecipe

    @staticmethod
    def from_recipe(recipe: LinearRecipe) -> "DeferredLogits":
        """Make deferred logits of a ``recipe``."""
        shape = (*recipe.hidden.shape[:-2], 0, recipe.shard.size)
        deferred = recipe.hidden.detach().new_empty(shape).as_subclass(DeferredLogits)
        deferred.recipe = recipe
        return deferred

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = super().__torch_function__(func, types, args, kwargs)
        if isinstance(result, DeferredLogits):
            source = next(x for x in _operands(args, kwargs) if isinstance(x, DeferredLogits))
            result.recipe = _followed_by(source.recipe, func, args, kwargs)
        return result

    def loss_sum(self, targets: Tensor, ignore_index: int, label_smoothing: float) -> Tensor:
        """Sums the losses of ``targets`` [batch * seq], chunk by chunk: a scalar in float32."""
        recipe = self.recipe
        hidden = recipe.hidden.flatten(0, -2)
        if recipe.kernel != "torch":
            _refuse_operations(recipe)
            return fused_loss_sum(
                recipe.kernel, hidden, recipe.weight, recipe.bias, targets, ignore_index, label_smoothing
            )
        options = ChunkOptions(
            chunk_size=recipe.chunk_size,
            shard=recipe.shard.limited(self.shape[-1]),
            transform=_composed(recipe.operations) if recipe.operations else None,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            gradients=torch.is_grad_enabled(),
            passes=recipe.passes,
        )
        return chunked_loss_sum(hidden, recipe.weight, recipe.bias, targets, options)


def _operands(args: tuple, kwargs: dict[str, Any]) -> Iterator[Any]:
    for operand in (*args, *kwargs.values()):
        if isinstance(operand, tuple | list):
            yield from operand
        else:
            yield operand


def _followed_by(recipe: LinearRecipe, func: Callable, args: tuple, kwargs: dict[str, Any]) -> LinearRecipe:
    limit = _vocabulary_limit(func, args)
    if limit is not None:
        operation = _limit_to(max(0, limit - recipe.shard.start))
    elif _is_elementwise(func, args, kwargs):
        operation = _repeat(func, args, kwargs)
    else:
        raise ValueError(
            f"{recipe.owner} calls {getattr(func, '__name__', func)} on its logits, and a loss without logits knows "
            "only what treats each logit alone (scaling, soft-capping, casts); use chunked_loss=None"
        )
    return replace(recipe, operations=(*recipe.operations, operation))


def _is_elementwise(func: Callable, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Tells by its name whether a function is elementwise; other operands must be numbers, or constants of one
    element.
    """
    others = [x for x in _operands(args, kwargs) if isinstance(x, Tensor) and not isinstance(x, DeferredLogits)]
    constant = all(x.numel() == 1 and not x.requires_grad for x in others)
    return getattr(func, "__name__", "") in _ELEMENTWISE and constant and kwargs.get("out") is None


def _vocabulary_limit(func: Callable, args: tuple) -> int | None:
    """Reads ``n`` from ``logits[..., :n]``, which drops ids that only pad the vocabulary."""
    if getattr(func, "__name__", "") != "__getitem__" or not isinstance(args[1], tuple):
        return None
    *rest, last = args[1]
    whole = all(index is Ellipsis or index == slice(None) for index in rest)
    first = whole and isinstance(last, slice) and last.start is None and last.step is None
    return last.stop if first and isinstance(last.stop, int) and last.stop >= 0 else None


def _limit_to(width: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x[..., :width]


def _repeat(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    """Calls ``func`` with the same operands, but another tensor in the place of the logits."""
    # The place is kept and not the logits: they hold the hidden states of one step.
    here = [isinstance(x, DeferredLogits) for x in args]
    named = {name: isinstance(x, DeferredLogits) for name, x in kwargs.items()}
    others = [None if is_logits else x for is_logits, x in zip(here, args, strict=True)]
    constants = {name: x for name, x in kwargs.items() if not named[name]}

    def repeat(logits: Tensor) -> Tensor:
        operands = [logits if is_logits else x for is_logits, x in zip(here, others, strict=True)]
        return func(*operands, **constants, **{name: logits for name, is_logits in named.items() if is_logits})

    return repeat


def _composed(operations: tuple[Callable[[Tensor], Tensor], ...]) -> Callable[[Tensor], Tensor]:
    def apply(logits: Tensor) -> Tensor:
        for operation in operations:
            logits = operation(logits)
        return logits

    return apply


def _refuse_operations(recipe: LinearRecipe) -> None:
    if recipe.operations:
        raise ValueError(
            f"{recipe.owner} changes its logits between head and loss (soft-capping, scaling), which "
            f"loss_kernel={recipe.kernel!r} does not do; use loss_kernel='torch' with chunked_loss=1024"
        )
