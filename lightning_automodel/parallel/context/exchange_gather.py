"""The exchange that gathers: queries stay on their ranks, keys and values of all ranks come to them.

::

    rows of this rank      0-2          21-23              one call of the attention function for each chunk
    keys that they see     0-2          0-23               without a mask: up to the chunk's last row
    window of 6            0-2          16-23              with a mask: from the first key that any row sees to the last

Nothing whole is kept for the backward pass, which gathers keys and values again.
"""

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from lightning_automodel._compat.torch.tensors import without_modes
from lightning_automodel.distributed.sequence_rows import Bounds, Rows, gather_parts
from lightning_automodel.parallel.context.attention_call import AttentionCall
from lightning_automodel.parallel.context.causal import attend_causally, can_merge


def attend_to_gathered(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend with this rank's queries to the keys of all ranks: [batch, rows, heads, dim].

    Args:
        call: what is called.
        query: [batch, heads, rows, dim].
        key: [batch, kv heads, rows, dim].
        value: [batch, kv heads, rows, dim of values].
    """
    if call.causal and can_merge(query, value, call.dropout):
        return attend_causally(query, key, value, call.rows, call.kwargs.get("scaling")).transpose(1, 2)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return _attend_by_chunks(call, query, *gather_keys(key, value, call.rows))

    return call.keeping_little(attend, query, key, value)


def gather_keys(key: Tensor, value: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Join keys and values of all ranks, before heads repeat; in one collective where they have one shape."""
    if key.shape == value.shape:
        both = gather_parts(torch.stack([key, value]), 3, rows)
        return both[0], both[1]
    return gather_parts(key, 2, rows), gather_parts(value, 2, rows)


def seen_keys(mask: Tensor, rows: Rows) -> list[Bounds]:
    """Find the first and the last key that any row of each own chunk sees. One wait for the device.

    Args:
        mask: [batch, heads or 1, rows, seq] of this rank: bool, or what is added to the scores.
        rows: of this rank.
    """
    if mask.dtype != torch.bool and not mask.is_floating_point():  # whole numbers hide no key
        return [(0, rows.length)] * len(rows.own_chunks)
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    found, at = [], 0
    for start, stop in rows.own_chunks:
        own = seen[:, :, at : at + stop - start].flatten(0, 1)
        at += stop - start
        columns = own.flatten(0, 1).any(0).long()
        all_see = own.any(-1).all() & columns.any()  # the softmax of a row that sees nothing is spread over all keys
        found.append(torch.stack([columns.argmax(), columns.flip(0).argmax(), all_see.long()]))
    bounds = torch.stack(found).tolist()
    return [(first, rows.length - behind) if all_see else (0, rows.length) for first, behind, all_see in bounds]


def _attend_by_chunks(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    outputs, at = [], 0
    for index, (start, stop) in enumerate(call.rows.own_chunks):
        own = slice(at, at + stop - start)
        at += stop - start
        first, last = (0, call.rows.length) if call.bounds is None else call.bounds[index]
        mask = call.mask
        if call.causal:
            last, mask = stop, _causal_mask(call, stop - start, stop, query.device)
        elif mask is not None:
            mask = mask[:, :, own if mask.shape[2] > 1 else slice(None), first:last]
        kwargs = call.kwargs if mask is not None else {**call.kwargs, "is_causal": False}
        keys = slice(first, last)
        parts = query[:, :, own], key[:, :, keys], value[:, :, keys]
        output, _ = call.function(call.module, *parts, mask, *call.args, **kwargs)
        outputs.append(output)
    return torch.cat(outputs, 1)


def _causal_mask(call: AttentionCall, rows: int, keys: int, device: torch.device) -> Tensor:
    """Lets each of the last ``rows`` of ``keys`` see the keys up to its own.

    On CUDA what torch makes for it is flash attention, which has no mask. It breaks a graph, and a compiled block with
    activation checkpointing (which has no ``again``) has to be one.
    """
    if call.again is None and torch.compiler.is_compiling():
        return torch.ones(1, 1, rows, keys, dtype=torch.bool, device=device).tril(keys - rows)
    with without_modes():  # what watches operations gives torch a tensor that it cannot make a bias of
        return causal_lower_right(rows, keys)
