"""Watches operations on DTensors, by private names of what dispatches them: draws, gathers, views, reductions."""

import functools
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from lightning_automodel._compat.torch.pytree import tree_leaves

HANDLERS: Any = DTensor._op_dispatcher._custom_op_handlers
"""What DTensor calls in the place of an operation."""


def by_torch(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation as DTensor would without the handler that calls this."""
    handle = HANDLERS.pop(op)
    try:
        return op(*args, **kwargs)
    finally:
        HANDLERS[op] = handle


@contextmanager
def shapes_inferred(within: Callable[[], AbstractContextManager[None]]) -> Generator[None, None, None]:
    """Let DTensor do ``within()``, while this context lasts, what tells the shapes of results.

    An operation that it has not seen with such arguments runs once more for that, on fake tensors of whole shapes.
    """
    infer = ShardingPropagator._propagate_tensor_meta_non_cached

    def inferred(propagator: ShardingPropagator, *args: Any, **kwargs: Any) -> Any:
        with within():
            return infer(propagator, *args, **kwargs)

    ShardingPropagator._propagate_tensor_meta_non_cached = inferred  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        ShardingPropagator._propagate_tensor_meta_non_cached = infer  # type: ignore[method-assign]


def _overloads(names: tuple[str, ...]) -> set[Any]:
    """Find the operations of torch's with these names, but for those that write into a tensor that they are given."""
    packets = [getattr(torch.ops.aten, name) for name in names]
    overloads = {getattr(packet, overload) for packet in packets for overload in packet.overloads()}
    return {op for op in overloads if not any(argument.is_out for argument in op._schema.arguments)}


_DRAWS = (
    *("normal_", "uniform_", "bernoulli_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_"),
    *("rand_like", "randn_like", "randint_like", "bernoulli", "normal", "poisson", "native_dropout"),
)


@functools.cache
def handle_draws(draw: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
    """Call ``draw(operation, arguments, keyword_arguments)`` from now on where numbers are drawn on DTensors with real
    memory. ``NotImplemented`` leaves it to torch, whose trackers of states (2.13) are private and for accelerators.
    """

    def handle(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        sharded = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DTensor))
        if type(sharded._local_tensor) is Tensor and not sharded.is_meta:
            drawn = draw(op, args, kwargs)
            if drawn is not NotImplemented:
                return drawn
        return by_torch(op, *args, **kwargs)

    HANDLERS.update(dict.fromkeys(_overloads(_DRAWS), handle))


@functools.cache
def tell_of_copied_views(tell: Callable[[str], None]) -> None:
    """Call ``tell(operation)`` from now on where what torch takes for a view of a DTensor (a slice, a row) is a copy,
    because the tensor was gathered for it. torch does so without a word, where a plain view would write through.
    """
    dispatcher: Any = DTensor._op_dispatcher
    original = dispatcher.redistribute_local_args

    def redistribute(op_info: Any, suggested: Any, *args: Any) -> Any:
        if suggested.op.is_view and op_info.flat_args_schema[0] != suggested.args_schema[0]:
            tell(str(suggested.op))
        return original(op_info, suggested, *args)

    dispatcher.redistribute_local_args = redistribute


def refuse_gathering(mesh: DeviceMesh, message: str) -> None:
    """Raise a ``ValueError`` with ``message`` from now on where shards of a DTensor over ``mesh`` would be gathered.

    Where ranks hold other sizes than its placement says, torch (2.13) waits forever, or returns other values.
    """
    _UNGATHERED[mesh] = message
    _watch_gathering()


_UNGATHERED: dict[DeviceMesh, str] = {}


@functools.cache
def _watch_gathering() -> None:
    def check(mesh: DeviceMesh, before: Any, after: Any) -> None:
        if mesh in _UNGATHERED and before != after and any(placement.is_shard() for placement in before):
            raise ValueError(_UNGATHERED[mesh])

    dispatcher: Any = DTensor._op_dispatcher
    of_arguments, of_one = dispatcher.redistribute_local_args, DTensor.redistribute

    def redistribute_arguments(op_info: Any, suggested: Any, *args: Any) -> Any:
        is_flat = op_info.args_tree_spec is None  # as torch's own: op_info.schema is not always there
        wanted = suggested.args_schema if is_flat else tree_leaves(suggested.args_schema)
        for before, after in zip(op_info.flat_args_schema, wanted, strict=False):
            if isinstance(before, DTensorSpec):
                check(before.mesh, before.placements, after.placements)
        return of_arguments(op_info, suggested, *args)

    def redistribute(self: DTensor, device_mesh: Any = None, placements: Any = None, **kwargs: Any) -> DTensor:
        check(self.device_mesh, tuple(self.placements), tuple(placements or ()))
        return of_one(self, device_mesh, placements, **kwargs)

    dispatcher.redistribute_local_args = redistribute_arguments
    DTensor.redistribute = redistribute  # type: ignore[method-assign]


_REDUCTIONS = (
    *("all", "amax", "amin", "any", "argmax", "argmin", "linalg_vector_norm", "max", "mean", "min", "norm", "prod"),
    *("std", "sum", "var", "_foreach_norm"),
)


@functools.cache
def watch_reductions(check: Callable[[DTensor], None]) -> None:
    """Call ``check(tensor)`` from now on before an operation that makes fewer numbers of those of a DTensor."""
    before = dict(HANDLERS)

    def handle(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, DTensor):
                check(leaf)
        return before[op](op, args, kwargs) if op in before else by_torch(op, *args, **kwargs)

    of_two = {op for op in _overloads(_REDUCTIONS) if any(a.name == "other" for a in op._schema.arguments)}
    HANDLERS.update(dict.fromkeys(_overloads(_REDUCTIONS) - of_two, handle))


@functools.cache
def watch_pairs(check: Callable[[list[DTensor]], None]) -> None:
    """Call ``check(tensors)`` from now on with DTensors whose elements an operation combines one by one, of lists with
    the first of each, then the second.
    """

    def handle(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values = [*args, *kwargs.values()]
        lists = [value for value in values if isinstance(value, list | tuple)]
        for group in (values, *zip(*lists, strict=False)):
            check([value for value in group if isinstance(value, DTensor)])
        return by_torch(op, *args, **kwargs)

    HANDLERS.update(dict.fromkeys(_known_pairs() - HANDLERS.keys(), handle))


def _known_pairs() -> set[Any]:
    """Find the operations that torch knows for DTensors and that combine elements of two tensors, or of two lists."""
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    known = {op for registry in vars(propagator).values() if isinstance(registry, dict) for op in registry}
    of_operations = {op for op in known if isinstance(op, type(torch.ops.aten.copy_.default))}
    return {
        op for op in of_operations if _is_by_element(op) and sum(_is_of_tensors(a) for a in op._schema.arguments) > 1
    }


def _is_by_element(op: Any) -> bool:
    return torch.Tag.pointwise in op.tags or "::_foreach_" in op.name() or op is torch.ops.aten.copy_.default


def _is_of_tensors(argument: Any) -> bool:
    return "Tensor" in str(argument.type)
