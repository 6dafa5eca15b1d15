"""Lets all ranks send in one order what Megatron-FSDP sends when a rank's pass meets it.

Experts and heads that samples choose, layers that a pass leaves out::

    backward pass of rank 0     block 2   block 1 (an expert is not reached: complete at the end)   block 0
    backward pass of rank 1     block 2   block 0 (likewise)   block 1

The library reduces what is complete, so that the gradients of block 0 on one rank were added to those of block 1 on
the other. Here a group of buckets waits for those before it, from the last registered to the first: about the order
of a backward pass, so that the wait is short.
"""

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_automodel._compat.megatron_fsdp import wrap_reduction


class ReductionsInOrder:
    """Holds reductions back until it is their turn.

    Args:
        wrapper: the library's.
    """

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self._order = _order(wrapper)
        self._held: dict[tuple[int, ...], dict[str, Any]] = {}
        self._turn = 0
        self._reduce: Callable[..., Any] = wrap_reduction(wrapper, self._reduce_in_turn)

    def begin(self) -> None:
        """Begin a backward pass; what one before it has held, which an exception has ended, is lost."""
        self._held.clear()
        self._turn = 0

    def _reduce_in_turn(self, buckets: Sequence[int], **how: Any) -> None:
        self._held[tuple(buckets)] = how
        while self._turn < len(self._order) and self._order[self._turn] in self._held:
            group = self._order[self._turn]
            self._turn += 1
            self._wrapper.grad_reduce_pipeline.wait_for_previous_grad_reduce(
                suggested_queue_capacity=self._wrapper.suggested_RS_queue_capacity
            )
            self._reduce(list(group), **self._held.pop(group))


def _order(wrapper: Any) -> list[tuple[int, ...]]:
    """List the groups of buckets that are reduced together, by their first parameter, from the last to the first."""
    buffer = wrapper.param_and_grad_buffer
    place = {parameter: i for i, parameter in enumerate(wrapper.raw_param.values())}
    trained = [tuple(i for i in g if buffer.parameter_groups[i].main_grad_buffer) for g in _groups(buffer)]

    def first(group: tuple[int, ...]) -> int:
        return min(place[parameter] for i in group for parameter in buffer.parameter_groups[i].params)

    return sorted(filter(None, trained), key=first, reverse=True)


def _groups(buffer: Any) -> set[tuple[int, ...]]:
    return set(map(tuple, buffer.bucket_to_bucket_group.values()))


# ---- gathers ---------------------------------------------------------------------------------------------------------

_MOST = 4096  # calls that are remembered
_BITS = 0xFFFF  # of a digest: sums of squares over thousands of ranks tell digests apart in float64


class Calls:
    """Notes which units a rank calls, in which order: each call gathers one, and nothing tells what ranks send apart.

    Args:
        units: by name.
    """

    def __init__(self, units: Iterable[tuple[str, nn.Module]]) -> None:
        self._digest = 0
        self._names: deque[str] = deque(maxlen=_MOST)
        for name, unit in units:
            unit.register_forward_pre_hook(partial(self._note, name))

    def terms(self) -> Tensor:
        """Compute this rank's terms of the sums that :meth:`check` takes: [2], float64."""
        digest = float(self._digest & _BITS)
        return torch.tensor([digest, digest * digest], dtype=torch.float64)

    def check(self, total: float, squares: float) -> None:
        """Begin anew. Collective.

        Raises:
            RuntimeError: on all ranks, if they have called different units since the last time.
        """
        ranks, names = dist.get_world_size(), list(self._names)
        self._digest = 0
        self._names.clear()
        if ranks * squares - total * total < (ranks - 1) / 2 or ranks == 1:
            return
        found: list[list[str]] = [[] for _ in range(ranks)]
        dist.all_gather_object(found, names)
        calls = next((c for c in zip_longest(*found, fillvalue="nothing more") if len(set(c)) > 1), ())
        each = ", ".join(f"rank {rank} called {name}" for rank, name in enumerate(calls))
        raise RuntimeError(
            f"{each or 'ranks called different layers'}; ranks that share shards have to call the same layers in the "
            "same order, since each call gathers them. Put layers that samples choose into one nn.Module whose forward "
            "chooses, and which all ranks call; or use zero_dp_strategy=2, which gathers all at once"
        )

    def _note(self, name: str, unit: nn.Module, args: tuple) -> None:
        self._digest = zlib.crc32(name.encode(), self._digest)
        self._names.append(name)
