"""The loss of a model that is called with labels: from shards of the logits, or without them. ::

    model(labels=...) --> head ------> whole logits (tp = 1) ------------+
                           |--------> ShardedLogits (a DTensor) ----------+--> the model's own scaling, soft-capping
                           +--------> DeferredLogits (chunked loss) ----+            |
                                  causal_lm_loss, or the model's own cross entropy, by what the logits are

A model that is called without labels returns whole logits, so a loss that a user computes from them is right.
"""

import inspect
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PreTrainedModel

from lightning_automodel._compat.torch.modules import own_children
from lightning_automodel.config import StageSwitches
from lightning_automodel.distributed.logs import log
from lightning_automodel.loss.deferred_logits import DeferredLogits
from lightning_automodel.loss.kernels import check_kernel
from lightning_automodel.loss.linear_recipe import LinearRecipe
from lightning_automodel.loss.model_losses import (
    calls_cross_entropy,
    compiled_loss,
    computes_loss,
    may_change_logits,
    replaced_loss,
)
from lightning_automodel.loss.passes import Passes, passes_for
from lightning_automodel.loss.sharded_logits import join_shards
from lightning_automodel.loss.vocab_parallel import VocabShard
from lightning_automodel.modules.forward import Around, code_of, wrap_forward
from lightning_automodel.modules.structure import class_names
from lightning_automodel.modules.wrappers import has_copies, is_wrapper, unwrapped

_CALLS = "_calls_with_labels"
_INSTALLED = "_gives_logits_to_a_loss"
_CHUNK_OF_KERNELS = 1  # they choose their own


def defers_logits(config: StageSwitches) -> bool:
    """Tells whether a loss is computed from the weight of the head, after the head's forward pass and without its
    logits.
    """
    return config.chunked_loss is not None or config.loss_kernel != "torch"


def install_loss(model: nn.Module, tp_mesh: DeviceMesh, config: StageSwitches, *, cuts_rows: bool = False) -> None:
    """Makes ``model``, and language models inside of it, compute their loss from what their heads give, in place.

    For classes whose forward pass calls ``self.loss_function``, where that is transformers' loss of causal models, or
    the one without a shift, or which calls torch's cross entropy, itself or in a layer around its head. Others (losses
    of their own, a ``loss_function`` that the user set) stay as they are, with whole logits.

    Args:
        model: with what its plan has split.
        tp_mesh: whose ranks hold the vocabulary.
        config: how the loss is computed.
        cuts_rows: context parallelism does: cross entropy of a model's own needs all positions then.

    Raises:
        ValueError: if the config asks for a loss without logits, and ``model`` cannot have one.
    """
    check_kernel(config.loss_kernel, tp_mesh.size(), tp_mesh.device_type)
    deferred = defers_logits(config)
    passes = passes_for(config, tp_mesh.device_type)
    found = False
    for owner in model.modules():
        if not isinstance(owner, PreTrainedModel):
            continue
        if (loss := replaced_loss(owner)) is not None:
            owner.loss_function = compiled_loss(loss, passes) if passes else loss
        elif cuts_rows or not _takes_cut_logits(owner, deferred):
            continue
        heads = _linear_heads(_head_of(owner))
        if deferred and any(map(_has_own_forward, heads)):
            continue
        shard = _shard_of(heads[0], tp_mesh) if heads else None
        if shard is not None and (deferred or shard.group is not None):
            around = _deferred_forward(config, passes, owner, shard) if deferred else _split_forward(shard, tp_mesh)
            _install_heads(owner, heads, around)
            found = True
            how = f"in chunks of {config.chunked_loss} ({config.loss_kernel})" if deferred else "from shards"
            log(f"{class_names(owner)[0]}: the loss is computed {how} of logits over {shard.size} classes")
    if deferred and not found:
        raise ValueError(_no_head(model, cuts_rows))


def _no_head(model: nn.Module, cuts_rows: bool) -> str:
    found = (_head_of(m) for m in model.modules() if isinstance(m, PreTrainedModel))
    heads = [head for head in found if head is not None]
    adapted = any(is_wrapper(head) and not has_copies(head) for head in heads)
    own = [class_names(head)[0] for head in heads if _has_own_forward(head)]
    but = f" (the forward pass of {own[0]} is its own)" if own else " and has no adapter" if adapted else ""
    if cuts_rows:
        but += " (with cp > 1: transformers' loss alone)"
    way_out = "leave the head out of what is adapted, or name it in modules_to_save, or " if adapted else ""
    way_out += "use cp=1, or " if cuts_rows else ""
    return (
        f"the forward pass of {type(model).__name__} computes neither transformers' loss nor torch's "
        f"cross entropy from one linear head that is whole or cut on the vocabulary{but}, which a loss without logits "
        f"needs; {way_out}use "
        "chunked_loss=None and loss_kernel='torch'"
    )


def _takes_cut_logits(model: PreTrainedModel, deferred: bool) -> bool:
    """Tell whether the code of ``model`` computes cross entropy itself, and changes no logits in place."""
    head = _head_of(model)
    return calls_cross_entropy(model, head) and (deferred or not may_change_logits(model, head))


def _head_of(model: PreTrainedModel) -> Any:
    """Finds what gives the logits: of the model, or of one inside of it that it calls."""
    inner = (m.get_output_embeddings() for m in model.modules() if isinstance(m, PreTrainedModel))  # itself first
    return next((head for head in inner if head is not None), None)


def _linear_heads(head: Any) -> list[nn.Linear]:
    """Returns the head, or itself and the copies of it that train in its place, if it is linear."""
    if head is None:
        return []
    trained: Any = own_children(head).get("modules_to_save") if has_copies(head) else None
    copies = () if trained is None else trained.values()
    found = [unwrapped(head), *copies] if copies else [head]
    return found if all(isinstance(module, nn.Linear) for module in found) else []


def _has_own_forward(head: nn.Module) -> bool:
    """Tells whether a class derived from ``nn.Linear``, or code assigned to ``forward``, may give something else than
    the product with its weight.
    """
    return isinstance(head, nn.Linear) and code_of(head) is not nn.Linear.forward


def _shard_of(head: nn.Linear, tp_mesh: DeviceMesh) -> VocabShard | None:
    """Finds the rank's shard of the vocabulary; ``None`` if the head is split in another way."""
    (placement,) = head.weight.placements if isinstance(head.weight, DTensor) else (Replicate(),)
    if placement not in (Shard(0), Replicate()):
        return None
    return VocabShard.of(head.weight.shape[0], None if placement.is_replicate() else tp_mesh.get_group())


def _install_heads(owner: PreTrainedModel, heads: Sequence[nn.Linear], around: Around) -> None:
    owner.register_forward_pre_hook(_enter_model(owner), with_kwargs=True)
    owner.register_forward_hook(_leave_model, always_call=True)
    for head in heads:
        vars(head)[_CALLS] = _calls(_head_of(owner))
        if not vars(head).setdefault(_INSTALLED, False):  # a model around another one has the same head
            vars(head)[_INSTALLED] = True
            wrap_forward(head, around)


def _enter_model(model: PreTrainedModel) -> Callable:
    position = _position_of_labels(type(model))
    has_own = calls_cross_entropy(model, _head_of(model))

    def hook(model: PreTrainedModel, args: tuple, kwargs: dict) -> None:
        labels = kwargs.get("labels") if position is None or len(args) <= position else args[position]
        has_labels = labels is not None and (has_own or computes_loss(model))
        head = _head_of(model)
        _calls(head).append(has_labels or _has_labels(head))

    return hook


def _position_of_labels(kind: type[nn.Module]) -> int | None:
    """Find which argument of the forward pass the labels are; it may hand on all of them, ``*args``, to its base."""
    for base in (c for c in kind.__mro__ if "forward" in vars(c)):
        parameters = list(inspect.signature(vars(base)["forward"]).parameters.values())[1:]
        at = next((i for i, p in enumerate(parameters) if p.name == "labels"), None)
        if at is not None:
            return None if parameters[at].kind is inspect.Parameter.KEYWORD_ONLY else at
        if not any(p.kind is p.VAR_POSITIONAL for p in parameters):
            break
    return None


def _calls(head: nn.Module) -> list[bool]:
    """Lists the running calls of models whose head this is, outer ones first, and whether they have labels.

    A model may call another one inside of it without labels, and compute the loss from its logits. Kept on the head and
    not in a closure, because a copy of the model must ask its own head.
    """
    return vars(head).setdefault(_CALLS, [])


def _has_labels(head: nn.Module) -> bool:
    return _calls(head)[-1:] == [True]


def _leave_model(model: PreTrainedModel, args: tuple, output: Any) -> Any:
    """Replace logits that were not computed by ``None`` in what the outermost model returns."""
    calls = _calls(_head_of(model))
    if calls:
        calls.pop()
    if calls:
        return output
    if isinstance(output, tuple):
        return tuple(None if isinstance(x, DeferredLogits) else x for x in output)
    if isinstance(output, MutableMapping):  # of transformers, too
        for name in [name for name, value in output.items() if isinstance(value, DeferredLogits)]:
            output[name] = None
    elif isinstance(getattr(output, "logits", None), DeferredLogits):
        output.logits = None
    return output


def _split_forward(shard: VocabShard, tp_mesh: DeviceMesh) -> Around:
    def around(head: nn.Module, forward: Callable[..., Tensor], args: tuple, kwargs: dict[str, Any]) -> Tensor:
        logits = forward(*args, **kwargs)  # [..., vocab / tp]
        return join_shards(logits, tp_mesh, shard.size) if _has_labels(head) else logits

    return around


def _deferred_forward(
    config: StageSwitches, passes: Passes | None, owner: PreTrainedModel, shard: VocabShard
) -> Around:
    name = type(owner).__name__

    def around(head: nn.Module, forward: Callable[..., Tensor], args: tuple, kwargs: dict[str, Any]) -> Tensor:
        if not _has_labels(head):
            return forward(*args, **kwargs)
        assert isinstance(head, nn.Linear)
        hidden = args[0] if args else kwargs["input"]
        recipe = LinearRecipe(
            local=hidden,
            dim=hidden.ndim - 1,
            size=shard.size,
            weight=head.weight,
            bias=head.bias,
            shard=shard,
            dtype=hidden.dtype,
            chunk_size=config.chunked_loss or _CHUNK_OF_KERNELS,
            kernel=config.loss_kernel,
            passes=passes,
            owner=name,
        )
        return DeferredLogits.from_recipe(recipe)

    return around
