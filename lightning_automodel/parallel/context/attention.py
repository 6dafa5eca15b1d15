"""Attention on a rank's rows: queries stay, and the attention function gets the keys and values of all ranks."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_automodel._compat.transformers.attention import MASKS_ARE_TENSORS, route_attention
from lightning_automodel._compat.transformers.models import attention_of
from lightning_automodel.distributed.sequence_rows import Rows
from lightning_automodel.modules.forward import recomputation_context
from lightning_automodel.modules.structure import class_names
from lightning_automodel.parallel.context.attention_call import AttentionCall
from lightning_automodel.parallel.context.exchange_all_to_all import attend_by_heads
from lightning_automodel.parallel.context.exchange_gather import attend_to_gathered
from lightning_automodel.parallel.context.state import StreamOnRows
from lightning_automodel.plans.context import ROWS_OF_ATTENTION
from lightning_automodel.plans.known_code import is_own_attention

Attention = Callable[..., tuple[Tensor, Tensor | None]]


def exchanges(module: nn.Module) -> bool:
    """Tells whether the attention function that ``module`` uses now takes masks that can be cut into rows.

    A function that somebody registered under the name of one of transformers' may count places.
    """
    name = implementation(module)
    return name in MASKS_ARE_TENSORS and is_own_attention(name)


def implementation(module: nn.Module) -> str | None:
    """Return the name of the attention function that ``module`` uses."""
    return attention_of(module.config)


def bind_attention(module: nn.Module, stream: StreamOnRows) -> None:
    """Let the attention functions that ``module`` calls see the keys and values of all ranks."""

    def attend(function: Attention, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        if stream.rows is None or not exchanges(module):
            return function(module, *args, **kwargs)
        return _attend(stream, function, module, *args, **kwargs)

    route_attention(module, attend)


def rows_of(value: Any, name: str, stream: StreamOnRows, module: nn.Module) -> Any:
    """Take the rows of an argument: tables [..., seq, features], positions [..., seq].

    All layers take the same ones, and so are their rows: the backward pass keeps them once.
    """
    if isinstance(value, tuple | list):
        return type(value)(rows_of(x, name, stream, module) for x in value)
    if not isinstance(value, Tensor) or stream.rows is None or value.ndim == 0:
        return value
    if id(value) not in stream.cut_already:
        own = stream.rows.cut(value, _dim_of_rows(value, name, stream.rows, module))
        stream.cut_already[id(value)] = value, own
    return stream.cut_already[id(value)][1]


def _dim_of_rows(value: Tensor, name: str, rows: Rows, module: nn.Module) -> int:
    is_table = value.is_floating_point() or value.is_complex()
    dim = value.ndim - 2 if is_table and value.ndim > 1 else value.ndim - 1
    if value.shape[dim] == rows.length:
        return dim
    dims = [d for d, size in enumerate(value.shape) if size == rows.length]
    if len(dims) != 1:
        raise ValueError(_unknown(module, name, value, rows))
    return dims[0]


def _unknown(module: nn.Module, name: str, value: Tensor, rows: Rows) -> str:
    return (
        f"context parallelism cannot tell which dimension of {name} {list(value.shape)}, which enters a "
        f"{class_names(module)[0]}, holds the sequence of {rows.length} tokens; use cp=1"
    )


def _attend(
    stream: StreamOnRows,
    function: Attention,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend with query [batch, heads, rows, dim] to key and value of all ranks: [batch, rows, heads, dim]."""
    assert stream.rows is not None
    _check(stream.rows, module, query, key, attention_mask, kwargs)
    by_heads = stream.chooses_heads(module, query, key, value, attention_mask)
    mask, bounds = (attention_mask, None) if by_heads else stream.own_mask(attention_mask)
    if mask is not None and mask.dtype == torch.bool and implementation(module) == "eager":
        bounds = None  # it adds 0 and 1 to the scores, and leaves no key out
    is_causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    call = AttentionCall(
        rows=stream.rows,
        function=function,
        module=module,
        mask=mask,
        bounds=bounds,
        causal=mask is None and causal and implementation(module) == "sdpa",
        args=args,
        kwargs=kwargs,
        again=None if stream.is_checkpointed or stream.block is None else recomputation_context(stream.block),
    )
    output = (attend_by_heads if by_heads else attend_to_gathered)(call, query, key, value)
    return output.contiguous(), None  # as transformers' functions give it: callers may view it


def _check(
    rows: Rows, module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
) -> None:
    """Refuse arguments of attention that are not known to be right on rows, rather than give a wrong number."""
    name = class_names(module)[0]
    for what, value in (("queries", query), ("keys", key)):
        if value.shape[2] != rows.count:
            raise ValueError(_beside(name, f"{what} {list(value.shape)} are not its {rows.count} rows"))
    if mask is not None and (mask.shape[-1] != rows.length or mask.shape[-2] not in (1, rows.count, rows.length)):
        raise ValueError(_beside(name, f"its mask {list(mask.shape)} is not [..., {rows.length}, {rows.length}]"))
    for key_name, extra in kwargs.items():
        if isinstance(extra, Tensor) and extra.ndim > 2 and key_name not in ROWS_OF_ATTENTION:
            raise ValueError(_beside(name, f"it gives the attention function {key_name} {list(extra.shape)}"))


def _beside(name: str, why: str) -> str:
    return (
        f"context parallelism gave a {name} rows of the sequence, but {why}; add the class to "
        "lightning_automodel.plans.additions.MIXES_TOKENS, and it sees the whole sequence"
    )
