"""Builds masks by rows: a model on rows needs only those of its queries.

::

    a sequence of 8, cp=2             stock [8, 8]      rank 0: rows 0, 1, 6, 7      rank 1: rows 2, 3, 4, 5
    causal_mask_function(q, kv)       kv <= q           [4, 8]                       [4, 8]

transformers' functions take the number of queries and the place of the first one: each chunk of rows is one call, and
windows, packed documents and padding are the model's own. All keys stay: [batch, 1, rows, seq].
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import sdpa_mask

from lightning_automodel._compat.transformers.attention import route_masks
from lightning_automodel.distributed.sequence_rows import Rows, join_rows


@dataclass
class RowMasks:
    """The masks of one forward pass of a model.

    Attributes:
        rows: of this rank.
        built: masks of rows, by their identity.
        joined: by the same identity, whole ones for modules that see the whole sequence.
    """

    rows: Rows
    built: dict[int, Tensor] = field(default_factory=dict)
    joined: dict[int, Tensor] = field(default_factory=dict)

    def build(self, function: Callable[..., Tensor | None], arguments: dict[str, Any]) -> Tensor | None:
        """Build this rank's rows of what ``function(**arguments)`` builds, if that is a mask of the sequence."""
        length, first = arguments["q_length"], arguments.get("q_offset", 0)
        if not (length == arguments["kv_length"] == self.rows.length) or is_left_out(function, arguments):
            return function(**arguments)
        rest = {**arguments, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        chunks = [
            function(**{**rest, "q_length": stop - start, "q_offset": first + start})
            for start, stop in self.rows.own_chunks
        ]
        mask = torch.cat([chunk for chunk in chunks if chunk is not None], 2)
        self.built[id(mask)] = mask
        return mask

    def whole(self, value: Any) -> Any:
        """Join the rows of a mask that was built here; other values stay."""
        if id(value) not in self.built:
            return value
        if id(value) not in self.joined:
            self.joined[id(value)] = join_rows(value, 2, self.rows)
        return self.joined[id(value)]


def is_left_out(function: Callable[..., Tensor | None], arguments: dict[str, Any]) -> bool:
    """Tell whether no mask is needed, without one: a pattern of one element has the conditions of the real one."""
    causal = function is sdpa_mask and arguments.get("allow_is_causal_skip", True)
    probe = {**arguments, "mask_function": _one_element, "use_vmap": False, "allow_is_causal_skip": causal}
    return sdpa_mask(**probe) is None


def _one_element(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=key.device)


_CURRENT: ContextVar[RowMasks | None] = ContextVar("masks of the model that runs", default=None)


def _build(function: Callable[..., Tensor | None], **arguments: Any) -> Tensor | None:
    masks = _CURRENT.get()
    return function(**arguments) if masks is None else masks.build(function, arguments)


@contextmanager
def building_rows(masks: RowMasks) -> Iterator[None]:
    """Make transformers' mask functions build the rows of ``masks``, within this context."""
    route_masks(_build)
    token = _CURRENT.set(masks)
    try:
        yield
    finally:
        _CURRENT.reset(token)
