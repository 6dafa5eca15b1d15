"""The exchange over heads: every rank gets the whole sequence of some heads, and attention is as on one device.

Masks are whole, and any kernel runs. Key/value heads are repeated as few times as the ranks need.
"""

import math
from typing import Any

from torch import Tensor, nn

from lightning_automodel.distributed.head_exchange import heads_to_rows, rows_to_heads
from lightning_automodel.distributed.sequence_rows import Rows
from lightning_automodel.parallel.context.attention_call import AttentionCall


def repeats(heads: int, kv_heads: int, ranks: int) -> int:
    """Compute how often key/value heads are repeated, so that every rank has as many."""
    times = math.lcm(kv_heads, ranks) // kv_heads
    return heads // kv_heads if heads % (kv_heads * times) else times


def why_not(query: Tensor, ranks: int) -> str | None:
    """Say why heads cannot be exchanged; ``None`` if they can."""
    heads = query.shape[1]
    return f"{heads} heads of a rank do not divide by cp={ranks}" if heads % ranks else None


def elements_moved(query: Tensor, key: Tensor, value: Tensor, ranks: int) -> tuple[float, float]:
    """Count what a rank receives for each token, in elements, if keys are gathered and if heads are exchanged.

    Keys and values are gathered forward and again backward, and their gradients are scattered; heads go there and back.
    """
    share, widths = (ranks - 1) / ranks, key.shape[-1] + value.shape[-1]
    heads, kv_heads = query.shape[1], key.shape[1]
    repeated = kv_heads * repeats(heads, kv_heads, ranks)
    moved = heads * (query.shape[-1] + value.shape[-1]) + repeated * widths
    return 3 * share * kv_heads * widths, 2 * share / ranks * moved


def attend_by_heads(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend to the whole sequence with some of the heads: [batch, rows, heads, dim].

    Args:
        call: what is called; its mask is whole.
        query: [batch, heads, rows, dim].
        key: [batch, kv heads, rows, dim].
        value: [batch, kv heads, rows, dim of values].
    """
    rows, heads = call.rows, query.shape[1]
    times = repeats(heads, key.shape[1], rows.group.size())
    if times > 1:
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    module = _SomeHeads(call.module, heads, times, rows)
    mask = _own_heads(call.mask, 1, heads, rows)
    kwargs = {name: _own_heads(x, 0, heads, rows) for name, x in call.kwargs.items()}

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return call.function(module, query, key, value, mask, *call.args, **kwargs)[0]

    of_heads = [rows_to_heads(x, rows) for x in (query, key, value)]
    output = attend(*of_heads) if mask is None else call.keeping_little(attend, *of_heads)
    return heads_to_rows(output.transpose(1, 2), rows).transpose(1, 2)


def _own_heads(value: Any, dim: int, heads: int, rows: Rows) -> Any:
    """Take this rank's share of what holds one entry for each head: masks, sinks."""
    if not isinstance(value, Tensor) or value.ndim <= dim or value.shape[dim] != heads or (dim == 0 and value.ndim > 1):
        return value
    count = heads // rows.group.size()
    return value.narrow(dim, rows.group.rank() * count, count)


class _SomeHeads:
    """An attention module, as its attention function sees it when it has some of the heads."""

    def __init__(self, module: nn.Module, heads: int, times: int, rows: Rows) -> None:
        self._module, self._heads, self._times, self._rows = module, heads, times, rows

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if name == "num_key_value_groups":
            return value // self._times
        if isinstance(value, nn.Parameter | Tensor):
            return _own_heads(value, 0, self._heads, self._rows)
        return value
