"""The losses that models of transformers compute, from logits of any kind, and which of them a model computes."""

import functools
import inspect
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss

from lightning_automodel._compat.transformers.models import loss_that_was_set
from lightning_automodel.distributed.logs import log_once
from lightning_automodel.distributed.sequence_rows import Rows, sum_parts
from lightning_automodel.loss.deferred_logits import DeferredLogits
from lightning_automodel.loss.functional import IGNORE_INDEX, count_targets, flat_losses, next_tokens
from lightning_automodel.loss.passes import Passes
from lightning_automodel.modules.reachable_code import may_change_tensors, names_in
from lightning_automodel.modules.structure import class_names

_WHOLE_LOSS = "_loss_of_whole_sequences"


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int | None = None,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = IGNORE_INDEX,
    shift_labels: Tensor | None = None,
    label_smoothing: float = 0.0,
    passes: Passes | None = None,
    **kwargs: Any,
) -> Tensor:
    """Computes transformers' ``ForCausalLMLoss`` of logits that are whole, sharded on the vocabulary, or deferred.

    Two things differ: labels of which none counts give 0 and not NaN, and ``label_smoothing`` is not ignored.

    Args:
        logits: [batch, seq, vocab].
        labels: [batch, seq]; position ``t`` is judged against label ``t + 1``.
        vocab_size: that of the logits decides.
        num_items_in_batch: what the sum of the losses is divided by; ``None``: the labels that count.
        ignore_index: value of labels that do not count.
        shift_labels: [batch, seq], labels that are shifted already; ``labels`` is then not looked at.
        label_smoothing: share of the target that is spread evenly over the vocabulary.
        passes: over logits, compiled; deferred ones have theirs.
        kwargs: what else the model was called with.

    Returns:
        a scalar in float32.
    """
    if shift_labels is None:
        assert labels is not None
        shift_labels = next_tokens(labels, ignore_index)
    targets = shift_labels.reshape(-1).to(logits.device)
    if isinstance(logits, DeferredLogits):
        total = logits.recipe.loss_sum(targets, ignore_index, label_smoothing)
    else:
        total = flat_losses(logits, targets, ignore_index, label_smoothing, passes).sum()
    if num_items_in_batch is None:
        return total / count_targets(targets, ignore_index)
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total / num_items_in_batch


def masked_lm_loss(logits: Tensor, labels: Tensor, vocab_size: int | None = None, **kwargs: Any) -> Tensor:
    """Computes transformers' ``ForMaskedLMLoss``: as :func:`causal_lm_loss`, with ``t`` judged against label ``t``."""
    return causal_lm_loss(logits, None, **{**kwargs, "shift_labels": labels})


_LOSSES = {ForCausalLMLoss: causal_lm_loss, ForMaskedLMLoss: masked_lm_loss}


def computes_loss(model: nn.Module) -> bool:
    """Tells whether ``model`` computes its loss by one of the functions above."""
    return _whole(loss_that_was_set(model)) in _LOSSES.values()


def _whole(function: Any) -> Any:
    return getattr(function, _WHOLE_LOSS, function)


def sum_loss_of_rows(
    function: Callable[..., Tensor], find_rows: Callable[[], Rows | None], scale: float
) -> Callable[..., Tensor]:
    """Let ``function``, one of the losses above, take the logits of a rank's rows, with labels of the whole sequence.

    Every rank differentiates its own part of the loss, and the parts are summed for the value.

    Args:
        function: the loss of a whole sequence.
        find_rows: called with every loss: the rows that the logits are of; ``None``: they are whole.
        scale: of the gradients.
    """
    name = "labels" if _whole(function) is masked_lm_loss else "shift_labels"

    def loss_of_rows(
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int | None = None,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = IGNORE_INDEX,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        rows = find_rows()
        arguments = {"vocab_size": vocab_size, "ignore_index": ignore_index, **kwargs}
        if rows is None:
            arguments |= {"labels": labels, "shift_labels": shift_labels}
            return function(logits, num_items_in_batch=num_items_in_batch, **arguments)
        targets = labels if name == "labels" else shift_labels
        if targets is None:
            assert labels is not None
            targets = next_tokens(labels, ignore_index)
        count = count_targets(targets, ignore_index) if num_items_in_batch is None else num_items_in_batch
        arguments |= {"labels": None, name: rows.cut(targets, 1)}
        return sum_parts(function(logits, num_items_in_batch=count, **arguments), rows.group, scale)

    setattr(loss_of_rows, _WHOLE_LOSS, _whole(function))
    return loss_of_rows


def replaced_loss(model: PreTrainedModel) -> Callable[..., Tensor] | None:
    """Chooses what computes the loss of ``model`` in the place of transformers' function, if it calls one of those."""
    if "loss_function" not in _names_in_forward(type(model)):
        return None
    found = _LOSSES.get(model.loss_function)
    name = getattr(model.loss_function, "__name__", "its loss")
    log_once(f"{class_names(model)[0]}: its code calls {name}, which is {'replaced' if found else 'left as it is'}")
    return found


def calls_cross_entropy(model: nn.Module, head: nn.Module) -> bool:
    """Tells whether the forward pass of ``model``, or of a layer around its ``head``, calls torch's cross entropy, as a
    function or a module.
    """
    if "loss_function" in _names_in_forward(type(model)):
        return False
    return any(map(_names_cross_entropy, _around(head, model)))


def may_change_logits(model: nn.Module, head: nn.Module) -> bool:
    """Tells whether the forward pass of ``model``, or of a layer around its ``head``, changes tensors in place."""
    return any(may_change_tensors(code) for module in _around(head, model) for code in _codes_of_forward(type(module)))


def _around(head: nn.Module, model: nn.Module) -> Iterator[nn.Module]:
    """Walk from ``model`` through the layers inside of it to what holds the ``head``."""
    parts = next((name for name, m in model.named_modules() if m is head), "").split(".")
    yield from (model.get_submodule(".".join(parts[:i])) for i in range(len(parts)))


def _names_cross_entropy(module: nn.Module) -> bool:
    names = _names_in_forward(type(module))
    return not names.isdisjoint({"cross_entropy", "CrossEntropyLoss"}) or any(
        isinstance(child, nn.CrossEntropyLoss) and name in names for name, child in module.named_children()
    )


def _names_in_forward(kind: type[nn.Module]) -> set[str]:
    """List what the forward pass of a class names, and that of its bases where it calls theirs."""
    return set().union(*map(names_in, _codes_of_forward(kind)))


def _codes_of_forward(kind: type[nn.Module]) -> Iterator[CodeType]:
    for base in kind.__mro__:
        if "forward" in vars(base):
            code = inspect.unwrap(vars(base)["forward"]).__code__
            yield code
            if "super" not in code.co_names:
                break


def compiled_loss(function: Callable[..., Tensor], passes: Passes) -> Callable[..., Tensor]:
    """Gives one of the losses above the compiled ``passes`` over logits."""
    compiled = functools.partial(function, passes=passes)
    setattr(compiled, _WHOLE_LOSS, function)
    return compiled
