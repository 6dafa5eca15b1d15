"""Keeps logits as a rank's rows of the sequence until somebody looks at the whole."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_automodel._compat.dtensor.gradients import to_local
from lightning_automodel.distributed.sequence_rows import Rows, gather_whole
from lightning_automodel.loss.sharded_logits import join_shards
from lightning_automodel.loss.vocab_parallel import Ungathered

_OF_GRAPH = {"requires_grad", "grad_fn", "is_leaf", "_base"}  # the last: FSDP2 asks whether outputs are views
_OF_SHAPE = {"size", "dim", "numel", "is_floating_point", "is_complex", "element_size"}
_ROWWISE = {"to", "float", "type", "detach", "contiguous", "clone"}
"""Functions of torch, by name, after which rows are rows still."""


class RowLogits(Ungathered):
    """Stands for logits [batch, seq, vocab] of which this rank has computed some rows, after the loss was computed.

    Most steps look at the loss alone, so nothing is gathered before a function of torch is called with these; what it
    gets is whole, in order, equal on all ranks, and differentiable. Collective then: all ranks call the same.
    """

    own: Tensor
    rows: Rows
    scale: float

    @staticmethod
    def of_rows(own: Tensor, rows: Rows, scale: float) -> "RowLogits":
        """Make logits from this rank's rows ``own`` [batch, rows, vocab], plain or cut on the vocabulary."""
        shape = (own.shape[0], rows.length, own.shape[2])
        empty = torch.empty(1, dtype=own.dtype, device=own.device)
        logits = empty.expand(shape).as_subclass(RowLogits)  # one element: nobody looks at it
        logits.own, logits.rows, logits.scale = own, rows, scale
        return logits

    def whole(self) -> Tensor:
        """Gather the rows of all ranks: [batch, seq, vocab], cut on the vocabulary as before."""
        if isinstance(self.own, DTensor):
            joined = gather_whole(to_local(self.own), 1, self.rows, self.scale)
            return join_shards(joined, self.own.device_mesh, self.shape[-1])
        return gather_whole(self.own, 1, self.rows, self.scale)

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        first = args[0] if args else None
        if isinstance(first, RowLogits) and name == "register_hook":
            return first.own.register_hook(*args[1:], **kwargs)  # FSDP2's: the backward pass begins
        if isinstance(first, RowLogits) and name == "__get__":
            attribute = func.__self__.__name__  # type: ignore[attr-defined]
            if attribute in _OF_GRAPH:
                return getattr(first.own, attribute)
            name = "dim"
        if isinstance(first, RowLogits) and name in _OF_SHAPE:
            return super().__torch_function__(func, types, args, kwargs)
        if isinstance(first, RowLogits) and name in _ROWWISE:
            return RowLogits.of_rows(func(first.own, *args[1:], **kwargs), first.rows, first.scale)
        return func(*(_whole(x) for x in args), **{key: _whole(x) for key, x in kwargs.items()})


def _whole(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_whole(x) for x in value)
    return value.whole() if isinstance(value, RowLogits) else value
