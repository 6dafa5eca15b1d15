"""Begins and ends a call of a model, says what it may cut, and makes rows whole again in what it returns."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from lightning_automodel.distributed.sequence_rows import Rows, gather_whole
from lightning_automodel.loss.install import computes_loss, sum_loss_of_rows
from lightning_automodel.loss.row_logits import RowLogits
from lightning_automodel.parallel.context.state import Pass, Stream
from lightning_automodel.plans.context import ContextLayout

_WHOLE = ("past_key_values", "cache_params", "output_attentions", "use_cache")
"""Arguments that, if they are given, ask for something that rows do not have: caches of all keys, scores."""


def install_on_models(model: nn.Module, call: Pass, streams: list[Stream], layout: ContextLayout) -> None:
    """Put hooks around every model that contains blocks; the outermost one that is called begins and ends a call."""
    for name in layout.models:
        inner = model.get_submodule(name)
        on_the_way = [hands_on for other, hands_on in layout.models.items() if _is_inside(other, name, layout)]
        leaves_rows = name not in layout.holders and all(on_the_way)
        inner.register_forward_pre_hook(_enter_model(call, streams, inner, leaves_rows), with_kwargs=True)
        if name in layout.holders:
            inner.register_forward_pre_hook(_enter_holder(call, inner), with_kwargs=True)
            inner.register_forward_hook(_leave_holder(call, [s for s in streams if s.entry.holder == name]))
        inner.register_forward_hook(_leave_model(call, streams), always_call=True)
        if computes_loss(inner):
            function: Any = inner.loss_function
            inner.loss_function = sum_loss_of_rows(function, lambda: _rows_at_head(call), call.scale)  # type: ignore
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    if head is not None and layout.models:
        head.register_forward_hook(_leave_head(call))


def _is_inside(other: str, name: str, layout: ContextLayout) -> bool:
    return other not in layout.holders and (other == name or not name or other.startswith(f"{name}."))


def _rows_at_head(call: Pass) -> Rows | None:
    return call.rows if call.leaves_rows else None


# ---- entering --------------------------------------------------------------------------------------------------------


def _enter_model(call: Pass, streams: list[Stream], model: nn.Module, leaves_rows: bool) -> Callable:
    names = list(inspect.signature(type(model).forward).parameters)[1:]

    def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        call.depth += 1
        if call.depth == 1:
            for stream in streams:
                stream.end()
            call.rows, call.has_labels = None, False
            call.allowed = not any(_is_given(given.get(name)) for name in _WHOLE)
            if getattr(getattr(module, "config", None), "output_attentions", False):
                call.allowed = False
            call.leaves_rows = leaves_rows and not _is_given(given.get("logits_to_keep"))
        call.has_labels |= given.get("labels") is not None and computes_loss(module)

    return hook


def _is_given(value: Any) -> bool:
    return value is not None and (isinstance(value, Tensor) or bool(value) or not isinstance(value, bool | int))


def _enter_holder(call: Pass, model: nn.Module) -> Callable:
    """Note batch and tokens of the call, which tell the dimension of the sequence, and switch the cache off."""
    names = list(inspect.signature(type(model).forward).parameters)[1:]

    def hook(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        first = given.get("inputs_embeds") if given.get("input_ids") is None else given.get("input_ids")
        call.shape = tuple(first.shape[:2]) if isinstance(first, Tensor) else ()
        if not call.allowed or "use_cache" not in names or names.index("use_cache") < len(args):
            return None
        return args, {**kwargs, "use_cache": False}

    return hook


# ---- leaving ---------------------------------------------------------------------------------------------------------


def _leave_holder(call: Pass, streams: list[Stream]) -> Callable:
    """Gather what holds rows, except hidden states that go straight to the head."""

    def hook(module: nn.Module, args: tuple, output: Any) -> Any:
        rows = call.rows
        for stream in streams:
            stream.end()
        if rows is None:
            return output
        is_tuple = isinstance(output, tuple)
        found: dict[Any, Any] = dict(enumerate(output)) if is_tuple else dict(output.items())
        first = next(iter(found))
        hidden = found[first]
        if isinstance(hidden, Tensor) and hidden.shape[1] == rows.length:
            hidden = rows.cut(hidden, 1)
        found = {key: _whole(value, call, rows) for key, value in found.items()}
        found[first] = hidden if call.leaves_rows else _whole(hidden, call, rows)
        return tuple(found.values()) if is_tuple else type(output)(**found)

    return hook


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


def _leave_head(call: Pass) -> Callable:
    """Gather the logits, unless the model computes its loss from a rank's rows: every rank repeats what follows."""

    def hook(head: nn.Module, args: tuple, logits: Tensor) -> Tensor:
        rows = _rows_at_head(call)
        if rows is None or call.has_labels or logits.ndim != 3 or logits.shape[1] != rows.count:
            return logits
        return gather_whole(logits, 1, rows, call.scale)

    return hook


def _leave_model(call: Pass, streams: list[Stream]) -> Callable:
    def hook(module: nn.Module, args: tuple, output: Any) -> Any:
        call.depth -= 1
        if call.depth:
            return output
        rows, call.rows = _rows_at_head(call), None
        for stream in streams:
            stream.end()
        if rows is None or not call.has_labels:
            return output
        if isinstance(output, tuple):
            return tuple(_whole_logits(x, call, rows) for x in output)
        if getattr(output, "logits", None) is not None:
            output.logits = _whole_logits(output.logits, call, rows)
        return output

    return hook


def _whole_logits(value: Any, call: Pass, rows: Rows) -> Any:
    if not isinstance(value, Tensor) or value.ndim != 3 or value.shape[1] != rows.count:
        return value
    return RowLogits.of_rows(value, rows, call.scale)
