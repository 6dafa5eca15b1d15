"""Private names of torch.distributed: the store over which processes have met, and what is known of its groups."""

from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroup, Store, TCPStore, distributed_c10d
from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_default_store, _world
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Into one tensor. torch 2.13 gave it another name, and warns of the old one."""

reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Likewise."""


def all_to_all_in_graph(flat: Tensor, received: list[int], sent: list[int], group: ProcessGroup) -> Tensor:
    """Exchange elements with a gradient, in compiled graphs. torch has this ``all_to_all_single`` in private only."""
    return wait_tensor(all_to_all_single_autograd(flat, received, sent, group))


def open_store(prefix: str) -> Store | None:
    """Opens another connection to the store of the default process group; ``None`` if the store cannot be shared.

    The one that torch uses is locked for as long as torch waits for a key. torch has no public way to it.
    """
    try:
        return PrefixStore(prefix, _get_default_store().clone())  # type: ignore[attr-defined]
    except (RuntimeError, NotImplementedError):  # stores of one process, as in torch's fake process group
        return None


def address_of(store: Store) -> tuple[str, int] | None:
    """Returns host and port of the process that keeps the store; ``None`` for stores on disk."""
    inner = store
    while isinstance(inner, PrefixStore):
        inner = inner.underlying_store
    return (inner.host, inner.port) if isinstance(inner, TCPStore) else None


def flatten_axes(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Give the ranks of several axes a group of their own, under ``name`` of the root mesh. Not public yet."""
    return mesh._flatten(name)


def unflatten_axis(mesh: DeviceMesh, sizes: dict[str, int]) -> None:
    """Give parts of the one axis of ``mesh`` groups of their own, under names of the root mesh, outermost first.

    torch can cut an axis, but keeps the parts under no name; the root mesh is where flattened axes have theirs. Before
    torch 2.13 it does not find them there.
    """
    view, root = mesh._unflatten(0, tuple(sizes.values()), tuple(sizes)), mesh._get_root_mesh()
    for name in sizes:
        root._flatten_mapping[name] = view[name]


@contextmanager
def concatenated_once() -> Generator[None, None, None]:
    """Makes FSDP2 put its axes and those of tensor parallelism side by side once, within this context.

    torch 2.13 makes such a mesh for every parameter, several milliseconds each.
    """
    original = DeviceMesh._concatenate
    made: dict[tuple[int, ...], tuple[list[DeviceMesh], DeviceMesh]] = {}  # what has an id there must live

    def once(meshes: list[DeviceMesh]) -> DeviceMesh:
        key = tuple(map(id, meshes))
        if key not in made:
            made[key] = (meshes, original(meshes))
        return made[key][1]

    DeviceMesh._concatenate = staticmethod(once)  # type: ignore[assignment]
    try:
        yield
    finally:
        DeviceMesh._concatenate = staticmethod(original)  # type: ignore[method-assign]


def set_timeout(group: ProcessGroup, timeout: timedelta) -> None:
    """Sets the timeout of every collective of ``group`` that follows.

    ``init_device_mesh`` takes a timeout only within options of one backend, and else uses torch's default (30 minutes)
    whatever ``init_process_group`` was given.
    """
    public = getattr(distributed_c10d, "set_timeout", None)  # from torch 2.15 on, where the private one warns
    (public or distributed_c10d._set_pg_timeout)(timeout, group)


def existing_groups() -> set[ProcessGroup]:
    """List the groups of this process, that of all processes among them. torch lists them in private only."""
    return set(_world.pg_map)


def forget_groups_of(mesh: DeviceMesh) -> None:
    """Let go of groups that were destroyed: caches of DTensor hold ``mesh``, which would keep their threads alive."""
    mesh._pg_registry.clear()


def forget_equal_meshes() -> None:
    """Clear what DTensor remembers of operations, which has results on the first of all meshes that are equal.

    Where the groups of that one are gone, those of another one would not be asked. torch clears it in private only.
    """
    _clear_sharding_prop_cache()


def has_groups(mesh: DeviceMesh) -> bool:
    """Tell whether the groups of the whole ``mesh`` have not been let go of."""
    return bool(mesh._pg_registry)


def shared_store(prefix: str) -> Store:
    """Returns the store of the default process group, as torch uses it itself, with ``prefix`` before all keys."""
    return PrefixStore(prefix, _get_default_store())


def group_of_name(name: str) -> ProcessGroup:
    """Return the group that calls itself ``name``; operations of torch's take groups so, and find them privately."""
    return distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def timeout_of(group: ProcessGroup) -> timedelta:
    """Return the timeout of collectives over ``group``, which may be another than it was made with."""
    return group._get_backend(group._device_types[0]).options._timeout
