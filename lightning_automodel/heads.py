"""The loss of a model that is called with labels: from slices of the logits, or without them. ::

    model(labels=...) --> head ------> whole logits (tp = 1) ------------+
                           |--------> SlicedLogits (a DTensor) ----------+--> the model's own scaling, soft-capping
                           +--------> DeferredLogits (chunked loss) ----+            |
                                                            causal_lm_loss, by what the logits are

A model that is called without labels returns whole logits, so a loss that a user computes from them is right.
"""

import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss

from lightning_automodel.config import DDPConfig, FSDP2Config, MegatronFSDPConfig
from lightning_automodel.deferred import DeferredLogits, LinearRecipe
from lightning_automodel.kernels import check_kernel
from lightning_automodel.loss import IGNORE_INDEX, count_targets, cross_entropy, next_tokens
from lightning_automodel.sliced_logits import join_slices
from lightning_automodel.vocabulary import Part

LossConfig = FSDP2Config | DDPConfig | MegatronFSDPConfig
_CALLS = "_calls_with_labels"
_CHUNK_OF_KERNELS = 1  # they choose their own


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int | None = None,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = IGNORE_INDEX,
    shift_labels: Tensor | None = None,
    label_smoothing: float = 0.0,
    **kwargs: Any,
) -> Tensor:
    """transformers' ``ForCausalLMLoss`` for logits that are whole, cut on the vocabulary, or not computed.

    Two things differ: labels of which none counts give 0 and not NaN, and ``label_smoothing`` is not ignored.

    Args:
        logits: [batch, seq, vocab].
        labels: [batch, seq]; position ``t`` is judged against label ``t + 1``.
        vocab_size: that of the logits decides.
        num_items_in_batch: what the sum of the losses is divided by; ``None``: the labels that count.
        ignore_index: value of labels that do not count.
        shift_labels: [batch, seq], labels that are shifted already; ``labels`` is then not looked at.
        label_smoothing: share of the target that is spread evenly over the vocabulary.
        kwargs: what else the model was called with.

    Returns:
        a scalar in float32.
    """
    if shift_labels is None:
        assert labels is not None
        shift_labels = next_tokens(labels, ignore_index)
    targets = shift_labels.reshape(-1).to(logits.device)
    if isinstance(logits, DeferredLogits):
        total = logits.loss_sum(targets, ignore_index, label_smoothing)
    else:
        total = cross_entropy(
            logits, targets, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="sum"
        )
    if num_items_in_batch is None:
        return total / count_targets(targets, ignore_index)
    return total / torch.as_tensor(num_items_in_batch, device=total.device)


def masked_lm_loss(logits: Tensor, labels: Tensor, vocab_size: int | None = None, **kwargs: Any) -> Tensor:
    """transformers' ``ForMaskedLMLoss``: as :func:`causal_lm_loss`, with ``t`` judged against label ``t``."""
    return causal_lm_loss(logits, None, **{**kwargs, "shift_labels": labels})


_LOSSES = {ForCausalLMLoss: causal_lm_loss, ForMaskedLMLoss: masked_lm_loss}


def defers_logits(config: LossConfig) -> bool:
    """Whether a loss is computed from the weight of the head, after the head's forward pass and without its logits."""
    return config.chunked_loss is not None or config.loss_kernel != "torch"


def install_loss(model: nn.Module, tp_mesh: DeviceMesh, config: LossConfig) -> None:
    """Makes ``model``, and language models inside of it, compute their loss from what their heads give, in place.

    For classes whose forward pass calls ``self.loss_function``, where that is transformers' loss of causal models, or
    the one without a shift. Others (losses of their own, a ``loss_function`` that the user set) stay as they are, with
    whole logits.

    Raises:
        ValueError: if the config asks for a loss without logits, and ``model`` cannot have one.
    """
    check_kernel(config.loss_kernel, tp_mesh.size(), tp_mesh.device_type)
    deferred = defers_logits(config)
    found = False
    for owner in model.modules():
        if not isinstance(owner, PreTrainedModel) or (loss := _loss_for(owner)) is None:
            continue
        owner.loss_function = loss
        head = _head_of(owner)
        part = _part_of(head, tp_mesh) if isinstance(head, nn.Linear) else None
        if part is not None and (deferred or part.group is not None):
            _install_head(owner, head, part, tp_mesh, config if deferred else None)
            found = True
    if deferred and not found:
        raise ValueError(
            f"{type(model).__name__} does not compute transformers' causal loss from one linear head that is whole or "
            "cut on the vocabulary, which a loss without logits needs; use chunked_loss=None and loss_kernel='torch'"
        )


def _loss_for(model: PreTrainedModel) -> Callable[..., Tensor] | None:
    """What computes the loss of ``model`` in the place of transformers' function, if it calls one of those."""
    forward = inspect.unwrap(type(model).forward)
    return _LOSSES.get(model.loss_function) if "loss_function" in forward.__code__.co_names else None


def _head_of(model: PreTrainedModel) -> Any:
    """What gives the logits: of the model, or of one inside of it that it calls."""
    inner = (m.get_output_embeddings() for m in model.modules() if isinstance(m, PreTrainedModel))  # itself first
    return next((head for head in inner if head is not None), None)


def _part_of(head: nn.Linear, tp_mesh: DeviceMesh) -> Part | None:
    """The rank's slice of the vocabulary; ``None`` if the head is split in another way."""
    (placement,) = head.weight.placements if isinstance(head.weight, DTensor) else (Replicate(),)
    if placement not in (Shard(0), Replicate()):
        return None
    return Part.of(head.weight.shape[0], None if placement.is_replicate() else tp_mesh.get_group())


def _install_head(
    owner: PreTrainedModel, head: nn.Linear, part: Part, tp_mesh: DeviceMesh, config: LossConfig | None
) -> None:
    owner.register_forward_pre_hook(_enter_model(owner), with_kwargs=True)
    owner.register_forward_hook(_leave_model, always_call=True)
    name = type(owner).__name__
    forward = _deferred_forward(part, config, name) if config else _split_forward(part, tp_mesh)
    head.forward = MethodType(forward, head)  # type: ignore[method-assign]


def _enter_model(model: PreTrainedModel) -> Callable:
    names = list(inspect.signature(type(model).forward).parameters)[1:]
    position = names.index("labels") if "labels" in names else len(names)

    def hook(model: PreTrainedModel, args: tuple, kwargs: dict) -> None:
        labels = args[position] if len(args) > position else kwargs.get("labels")
        has_labels = labels is not None and model.loss_function in _LOSSES.values()
        head = _head_of(model)
        _calls(head).append(has_labels or _has_labels(head))

    return hook


def _calls(head: nn.Module) -> list[bool]:
    """The calls that are running of models whose head this is, outer ones first, and whether they have labels.

    A model may call another one inside of it without labels, and compute the loss from its logits. Kept on the head and
    not in a closure, because a copy of the model must ask its own head.
    """
    return head.__dict__.setdefault(_CALLS, [])


def _has_labels(head: nn.Module) -> bool:
    return _calls(head)[-1:] == [True]


def _leave_model(model: PreTrainedModel, args: tuple, output: Any) -> Any:
    """Logits that were not computed are ``None`` in what the outermost model returns."""
    calls = _calls(_head_of(model))
    if calls:
        calls.pop()
    if calls:
        return output
    if isinstance(output, tuple):
        return tuple(None if isinstance(x, DeferredLogits) else x for x in output)
    if isinstance(getattr(output, "logits", None), DeferredLogits):
        output.logits = None
    return output


def _split_forward(part: Part, tp_mesh: DeviceMesh) -> Callable[[nn.Linear, Tensor], Tensor]:
    def forward(self: nn.Linear, input: Tensor) -> Tensor:
        logits = type(self).forward(self, input)  # [..., vocab / tp]
        return join_slices(logits, tp_mesh, part.size) if _has_labels(self) else logits

    return forward


def _deferred_forward(part: Part, config: LossConfig, owner: str) -> Callable[[nn.Linear, Tensor], Tensor]:
    def forward(self: nn.Linear, input: Tensor) -> Tensor:
        if not _has_labels(self):
            return type(self).forward(self, input)
        recipe = LinearRecipe(
            hidden=input,
            weight=self.weight,
            bias=self.bias,
            part=part,
            chunk_size=config.chunked_loss or _CHUNK_OF_KERNELS,
            kernel=config.loss_kernel,
            owner=owner,
        )
        return DeferredLogits.from_recipe(recipe)

    return forward
