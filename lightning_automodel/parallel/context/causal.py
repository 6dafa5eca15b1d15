"""Causal attention of a rank's rows without a mask and without a matrix of scores, from parts that are merged.

::

    row i of chunk [a, b)   sees keys [0, a) -> out 1, log-sum-exp 1  |  out = sum of exp(lse - merged lse) * part
                            sees keys [a, i] -> out 2, log-sum-exp 2  |

The backward pass gives each part the merged log-sum-exp, which makes its gradient that of the whole softmax (Liu et al.
2023, ring attention), and gathers keys and values again: queries, own keys and values, output and one number for each
query and head are kept.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lightning_automodel._compat.transformers.attention import flash_backward, flash_forward, has_flash
from lightning_automodel.distributed.sequence_rows import Rows, join_rows, sum_rows


def can_merge(query: Tensor, value: Tensor, dropout: float) -> bool:
    """Tells whether there is a kernel that gives the log-sum-exp: for values that are no wider than queries."""
    fits = value.shape[-1] <= query.shape[-1]
    return fits and has_flash(query) and not dropout and not torch.compiler.is_compiling()


def attend_causally(query: Tensor, key: Tensor, value: Tensor, rows: Rows, scale: float | None) -> Tensor:
    """Attend with the queries of this rank's rows to the keys of all ranks, up to each query's own.

    Args:
        query: [batch, heads, rows, dim].
        key: of this rank, [batch, kv heads, rows, dim].
        value: of this rank, [batch, kv heads, rows, dim or less].
        rows: of this rank.
        scale: of the scores; ``None``: one over the root of ``dim``.

    Returns:
        [batch, heads, rows, dim of values].
    """
    return _CausalParts.apply(query, key, value, rows, scale)


class _CausalParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, rows: Rows, scale: float | None) -> Tensor:
        keys, values = _gather_repeated(query, key, value, rows)
        outputs, sums, at = [], [], 0
        for start, stop in rows.own_chunks:
            own = query[:, :, at : at + stop - start]
            at += stop - start
            output, total = flash_forward(own, keys[:, :, start:stop], values[:, :, start:stop], True, scale)
            if start:
                past = flash_forward(own, keys[:, :, :start], values[:, :, :start], False, scale)
                output, total = _merge((output, total), past)
            outputs.append(output)
            sums.append(total)
        output, total = torch.cat(outputs, 2), torch.cat(sums, 2)
        ctx.save_for_backward(query, key, value, output, total)
        ctx.rows, ctx.scale = rows, scale
        return output[..., : value.shape[-1]]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, total = ctx.saved_tensors
        keys, values = _gather_repeated(query, key, value, ctx.rows)
        grad = functional.pad(grad, (0, values.shape[-1] - grad.shape[-1])).contiguous()
        d_query, d_keys, d_values, at = torch.zeros_like(query), torch.zeros_like(keys), torch.zeros_like(values), 0
        for start, stop in ctx.rows.own_chunks:
            own = slice(at, at + stop - start)
            at += stop - start
            of_queries = grad[:, :, own], query[:, :, own], output[:, :, own], total[:, :, own]
            for part, causal in ((slice(start, stop), True), (slice(0, start), False)):
                if part.stop > part.start:
                    found = flash_backward(*of_queries, keys[:, :, part], values[:, :, part], causal, ctx.scale)
                    d_query[:, :, own] += found[0]
                    d_keys[:, :, part] += found[1]
                    d_values[:, :, part] += found[2]
        d_key, d_value = (_sum_heads(x, key.shape[1]) for x in (d_keys, d_values))
        parts = sum_rows(torch.stack([d_key, d_value]), 3, ctx.rows)
        return d_query, parts[0], parts[1][..., : value.shape[-1]], None, None


def _gather_repeated(query: Tensor, key: Tensor, value: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
    """Gather all keys and values, a head for each head of the queries; narrow values are filled up with zeros."""
    value = functional.pad(value, (0, key.shape[-1] - value.shape[-1]))
    both = join_rows(torch.stack([key, value]), 3, rows)
    groups = query.shape[1] // key.shape[1]
    both = both if groups == 1 else both.repeat_interleave(groups, 2)
    return both[0], both[1]


def _sum_heads(gradient: Tensor, heads: int) -> Tensor:
    return gradient.unflatten(1, (heads, -1)).sum(2) if gradient.shape[1] != heads else gradient


def _merge(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    total = torch.logaddexp(one[1], other[1])
    weighted = [part * (sums - total).exp().unsqueeze(-1).to(part.dtype) for part, sums in (one, other)]
    return weighted[0] + weighted[1], total
