"""Begins and ends a call of a model, says what it may cut, and makes rows whole again in what it returns."""

import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_automodel._compat.transformers.attention import MASKS_ARE_TENSORS
from lightning_automodel._compat.transformers.models import attention_of, where_documents_are_found
from lightning_automodel.distributed.sequence_rows import Rows, average_grad, gather_whole
from lightning_automodel.loss.model_losses import computes_loss, sum_loss_of_rows
from lightning_automodel.loss.row_logits import RowLogits
from lightning_automodel.modules.forward import SharedByCopies, attributes_again, keep_for_recomputation
from lightning_automodel.modules.structure import class_names
from lightning_automodel.parallel.context.state import Pass, StreamOnRows
from lightning_automodel.parallel.lone_parts import is_run_for_a_part
from lightning_automodel.plans.context import ContextLayout, head_of

_WHOLE = ("past_key_values", "cache", "cache_params", "output_attentions", "use_cache")
"""Arguments that, if they are given, ask for something that rows do not have: caches of all keys, scores."""


def install_on_models(model: nn.Module, call: Pass, streams: list[StreamOnRows], layout: ContextLayout) -> None:
    """Put hooks around every model that contains blocks; the outermost one that is called begins and ends a call."""
    heads = {name: head for name in layout.models if (head := head_of(model.get_submodule(name))) is not None}
    for name in layout.models:
        inner = model.get_submodule(name)
        inside = {other: hands_on for other, hands_on in layout.models.items() if _is_inside(other, name, layout)}
        to_head = name not in layout.holders and not heads.keys().isdisjoint(inside)
        around = ModelOnRows(call, streams, to_head and all(inside.values()), name in layout.holders)
        around.begin_with(inner)
        if name in layout.holders:
            own = [stream for stream in streams if stream.entry.holder == name]
            HolderOnRows(call, own, _has_attention_on_rows(own, layout)).install(inner)
        around.end_with(inner)
        if computes_loss(inner):
            function: Any = inner.loss_function
            inner.loss_function = sum_loss_of_rows(function, lambda: _rows_at_head(call), call.scale)  # type: ignore
    for head in {id(head): head for head in heads.values()}.values():
        HeadOnRows(call).install(head)


def _is_inside(other: str, name: str, layout: ContextLayout) -> bool:
    return other not in layout.holders and (other == name or not name or other.startswith(f"{name}."))


def _has_attention_on_rows(streams: list[StreamOnRows], layout: ContextLayout) -> bool:
    return any(layout.attention_of(block) for stream in streams for block in stream.entry.blocks)


def _rows_at_head(call: Pass) -> Rows | None:
    return call.rows if call.leaves_rows else None


def _arguments(model: nn.Module) -> list[str]:
    return list(inspect.signature(type(model).forward).parameters)[1:]


def _is_given(value: Any) -> bool:
    return value is not None and (isinstance(value, Tensor) or bool(value) or not isinstance(value, bool | int))


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()


# ---- a call ----------------------------------------------------------------------------------------------------------


class ModelOnRows(SharedByCopies):
    """The hooks around a model that contains blocks: the outermost one that is called begins and ends a call.

    Args:
        call: that they begin and end.
        streams: of all lists of blocks.
        leaves_rows: there is a head, and every model on the way to it from the blocks hands rows on as they are.
        is_holder: the model runs blocks itself.
    """

    def __init__(self, call: Pass, streams: list[StreamOnRows], leaves_rows: bool, is_holder: bool) -> None:
        self.call, self.streams, self.leaves_rows, self.is_holder = call, streams, leaves_rows, is_holder
        self.arguments: list[str] = []

    def begin_with(self, model: nn.Module) -> None:
        """Call :meth:`enter` where ``model`` is entered."""
        self.arguments = _arguments(model)
        model.register_forward_pre_hook(self.enter, with_kwargs=True)

    def end_with(self, model: nn.Module) -> None:
        """Call :meth:`leave` where ``model`` is left, also if it raised."""
        model.register_forward_hook(self.leave, always_call=True)

    def enter(self, model: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Find out what a call may cut, and whether it computes its loss; what comes from outside has whole gradients.

        Another model may have computed it, or this one in an earlier call, and gave it away as a whole; or within this
        call blocks ran before, as where a model runs the one inside of it twice.
        """
        given = {**dict(zip(self.arguments, args, strict=False)), **kwargs}
        self.call.depth += 1
        if self.call.depth == 1:
            self._begin(model, given)
        self.call.has_labels |= given.get("labels") is not None and computes_loss(model)
        is_outside = self.call.depth == 1 or (self.is_holder and self.call.gave_whole)
        if not is_outside or not any(map(_is_differentiable, given.values())):
            return None
        return tuple(map(self._from_outside, args)), {name: self._from_outside(x) for name, x in kwargs.items()}

    def _from_outside(self, value: Any) -> Any:
        return average_grad(value, self.call.group) if _is_differentiable(value) else value

    def _begin(self, model: nn.Module, given: dict[str, Any]) -> None:
        call = self.call
        for stream in self.streams:
            stream.end()
        call.rows, call.has_labels, call.gave_whole = None, False, False
        call.allowed = not any(_is_given(given.get(name)) for name in _WHOLE)
        if getattr(getattr(model, "config", None), "output_attentions", False):
            call.allowed = False
        call.leaves_rows = self.leaves_rows and not _is_given(given.get("logits_to_keep"))

    def leave(self, model: nn.Module, args: tuple, output: Any) -> Any:
        """Mark the logits that go to the caller as rows where they are."""
        call = self.call
        call.depth -= 1
        if call.depth:
            return output
        rows, call.rows = _rows_at_head(call), None
        call.stop_building()
        for stream in self.streams:
            stream.end()
        if rows is None or not call.has_labels:
            return output
        if isinstance(output, tuple):
            return tuple(_whole_logits(x, call, rows) for x in output)
        if getattr(output, "logits", None) is not None:
            output.logits = _whole_logits(output.logits, call, rows)
        return output


def _whole_logits(value: Any, call: Pass, rows: Rows) -> Any:
    if not isinstance(value, Tensor) or value.ndim != 3 or value.shape[1] != rows.count:
        return value
    return RowLogits.of_rows(value, rows, call.scale)


class HeadOnRows(SharedByCopies):
    """The hook behind the LM head.

    Args:
        call: that is running.
    """

    def __init__(self, call: Pass) -> None:
        self.call = call

    def install(self, head: nn.Module) -> None:
        """Run this hook in every forward pass of ``head``."""
        head.register_forward_hook(self.leave)

    def leave(self, head: nn.Module, args: tuple, logits: Tensor) -> Tensor:
        """Gather logits unless the model computes its loss from them: every rank repeats what follows."""
        rows = _rows_at_head(self.call)
        if rows is None or self.call.has_labels:
            return logits
        if logits.ndim != 3 or logits.shape[1] != rows.count:
            raise ValueError(
                f"context parallelism gave the model {rows.count} rows of the sequence, and its head gives "
                f"{list(logits.shape)}: its code picks tokens in front of it; let it return logits of all tokens, or "
                "hidden states of its base model, and pick there, or use cp=1"
            )
        return gather_whole(logits, 1, rows, self.call.scale)


# ---- what holds the blocks -------------------------------------------------------------------------------------------


class HolderOnRows(SharedByCopies):
    """The hooks around the model that runs lists of blocks itself.

    Args:
        call: that is running.
        streams: of its lists.
        masks_by_rows: its masks are built by rows where a call may be cut.
    """

    def __init__(self, call: Pass, streams: list[StreamOnRows], masks_by_rows: bool) -> None:
        self.call, self.streams, self.masks_by_rows = call, streams, masks_by_rows
        self.gives_rows = any(set(stream.entry.blocks) - stream.entry.gathered_after for stream in streams)
        self.arguments: list[str] = []

    def install(self, holder: nn.Module) -> None:
        """Run these hooks in every forward pass of ``holder``; blocks that its code computes again find their rows."""
        self.arguments = _arguments(holder)
        holder.register_forward_pre_hook(self.enter, with_kwargs=True)
        holder.register_forward_hook(self.leave)
        known = ("depth", "allowed", "shape", "rows", "batch", "row_masks")
        keep_for_recomputation(holder, attributes_again(self.call, *known))
        for stream in self.streams:
            known = ("rows", "batch", "row_masks", "cut_already", "masks", "is_checkpointed")
            keep_for_recomputation(holder, attributes_again(stream, *known))

    def enter(self, holder: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Note the shape of what is read, which tells the dimension of the sequence; a cache is not written."""
        if is_run_for_a_part(holder):
            return None
        names, given = self.arguments, {**dict(zip(self.arguments, args, strict=False)), **kwargs}
        first = given.get("inputs_embeds") if given.get("input_ids") is None else given.get("input_ids")
        self.call.shape = tuple(first.shape[:2]) if isinstance(first, Tensor) else ()
        if self.masks_by_rows:
            self.call.build_row_masks()
        if not self.call.allowed or "use_cache" not in names or names.index("use_cache") < len(args):
            return None
        if _would_write_a_cache(holder, given.get("use_cache")):
            self.call.building.enter_context(where_documents_are_found(partial(_refuse_documents, holder)))
        return args, {**kwargs, "use_cache": False}

    def leave(self, holder: nn.Module, args: tuple, output: Any) -> Any:
        """Hand hidden states on as rows if they go to the head; gather them otherwise, and all else that is rows."""
        rows = self.call.rows
        self.call.gave_whole |= rows is not None
        self.call.stop_building()
        for stream in self.streams:
            stream.end()
        if rows is None or not (self.call.leaves_rows or self.gives_rows):
            return output
        is_tuple = isinstance(output, tuple)
        found: dict[Any, Any] = dict(enumerate(output)) if is_tuple else dict(output.items())
        first = next(iter(found))
        hidden = found[first]
        if isinstance(hidden, Tensor) and hidden.shape[1] == rows.length:
            hidden = rows.cut(hidden, 1)
        found[first] = hidden if self.call.leaves_rows else _whole(hidden, self.call, rows)
        found |= {key: _whole(value, self.call, rows) for key, value in found.items() if key != first}
        return tuple(found.values()) if is_tuple else type(output)(**found)


def _would_write_a_cache(holder: nn.Module, use_cache: bool | None) -> bool:
    """Tell whether one process would hand an empty cache on, with which transformers' masks look for no documents."""
    config = getattr(holder, "config", None)
    asked = getattr(config, "use_cache", False) if use_cache is None else use_cache
    recomputed = getattr(holder, "gradient_checkpointing", False) and holder.training
    return bool(asked) and not recomputed and attention_of(config) in MASKS_ARE_TENSORS


def _refuse_documents(holder: nn.Module) -> None:
    raise ValueError(
        f"positions of a row begin anew in {class_names(holder)[0]}, and its config says use_cache=True: with a cache, "
        "documents of a row see each other in transformers, and without one, as under cp, they are kept apart. Call "
        "the model with use_cache=False, which keeps them apart on one device, too; if they are to see each other, "
        "give an attention_mask"
    )


def _whole(value: Any, call: Pass, rows: Rows) -> Any:
    """Gather rows, [batch, rows, ...] or [batch x rows, ...], in tuples too; what is none stays as it is."""
    if isinstance(value, tuple | list):
        return type(value)(_whole(x, call, rows) for x in value)
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    if value.ndim >= 3 and value.shape[:2] == (call.batch, rows.count):
        return gather_whole(value, 1, rows, call.scale)
    if value.ndim == 2 and value.shape[0] == call.batch * rows.count:
        return gather_whole(value.unflatten(0, (call.batch, rows.count)), 1, rows, call.scale).flatten(0, 1)
    return value
