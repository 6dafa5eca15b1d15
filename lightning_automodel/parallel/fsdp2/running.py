"""What sharded models are told while they run: what to gather ahead, which gradients to keep, what to free."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_automodel._compat.fsdp2.units import fsdp_units


def set_prefetch(
    forward: Sequence[nn.Module],
    backward: Sequence[nn.Module],
    forward_depth: int,
    backward_depth: int,
    inside: Mapping[nn.Module, Sequence[nn.Module]] | None = None,
) -> None:
    """Makes each unit prefetch the next ``forward_depth`` of ``forward`` in the forward pass, and ``backward_depth``
    before it in ``backward`` in the backward pass, while it computes. Both are in the order of the forward pass, with
    any one module of a unit. What is ``inside`` of a unit it prefetches first.
    """
    own = inside or {}
    for i, unit in enumerate(forward):
        assert isinstance(unit, FSDPModule)
        after = forward[i + 1 : i + 1 + forward_depth]
        unit.set_modules_to_forward_prefetch(_units([*own.get(unit, ()), *after]))
    for i, unit in enumerate(backward):
        assert isinstance(unit, FSDPModule)
        before = backward[max(0, i - backward_depth) : i][::-1]
        unit.set_modules_to_backward_prefetch(_units([*own.get(unit, ()), *before]))


def fsdp_roots(module: nn.Module) -> list[FSDPModule]:
    """Finds the outermost FSDP2 modules in ``module``."""
    if isinstance(module, FSDPModule):
        return [module]
    return [root for child in module.children() for root in fsdp_roots(child)]


@contextmanager
def gradients_held(module: nn.Module, defer: bool = True) -> Generator[None, None, None]:
    """Keeps gradients of backward passes on their rank, within this context: for all micro-batches of a step but the
    last.

    Deferred reduction of two micro-batches over dp_shard=4. The gradient has four equal elements, of which each rank
    stores one in the end::

                         GPU 0      GPU 1      GPU 2      GPU 3
        micro-batch 1    1 1 1 1    2 2 2 2    3 3 3 3    4 4 4 4    within this context: nothing is sent
        micro-batch 2    5 5 5 5    6 6 6 6    7 7 7 7    8 8 8 8    the last one: what was held is added
        sum              6 6 6 6    8 8 8 8    10 10 ..   12 12 ..
        gradient         9          9          9          9          one reduce-scatter: (6 + 8 + 10 + 12) / 4

    Args:
        module: contains FSDP2 models.
        defer: ``FSDP2Config.defer_fsdp_grad_sync``; ``False``: gradients are reduced over the shards, and wait for the
            reduction over the replicas.
    """
    roots = fsdp_roots(module)
    for root in roots:
        root.set_requires_gradient_sync(False) if defer else root.set_requires_all_reduce(False)
    try:
        yield
    finally:
        for root in roots:
            root.set_requires_gradient_sync(True) if defer else root.set_requires_all_reduce(True)


def reshard(module: nn.Module) -> None:
    """Frees what a forward pass without a backward pass left gathered: the roots and the last blocks."""
    for unit in fsdp_units(module):
        unit.reshard()


def _units(modules: Sequence[nn.Module]) -> list[FSDPModule]:
    return [module for module in modules if isinstance(module, FSDPModule)]
