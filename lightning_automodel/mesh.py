"""Turns sizes into the one device mesh that every stage shares, and names its axes.

The mesh always has four axes, outermost first, size 1 included::

    dp_replicate  x  dp_shard  x  cp  x  tp
    \\___________  __________/     |     |
                \\/                |     +-- one layer's matrices are split over it
                dp                +-------- one sequence is split over it
      who sees which samples

Three flattened axes serve the groups that span several of them: ``dp`` (which data), ``dp_shard_cp`` (what FSDP2 shards
over) and ``dp_cp`` (what a loss averages over).
"""

import math
import warnings
from dataclasses import dataclass
from typing import Literal

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

DP_REPLICATE, DP_SHARD, CP, TP = "dp_replicate", "dp_shard", "cp", "tp"
DP, DP_SHARD_CP, DP_CP = "dp", "dp_shard_cp", "dp_cp"
AXES = (DP_REPLICATE, DP_SHARD, CP, TP)
FLATTENED = {DP: (DP_REPLICATE, DP_SHARD), DP_SHARD_CP: (DP_SHARD, CP), DP_CP: (DP_REPLICATE, DP_SHARD, CP)}

AutoSize = int | Literal["auto"]


@dataclass(frozen=True, kw_only=True)
class MeshSizes:
    """Resolved size of each axis of the mesh, in processes."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def world(self) -> int:
        """Number of processes."""
        return math.prod(self.shape)

    @property
    def data(self) -> int:
        """Number of ranks that see different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Sizes in the order of :data:`AXES`."""
        return (self.dp_replicate, self.dp_shard, self.cp, self.tp)


def resolve_sizes(
    world_size: int, *, tp: int = 1, cp: int = 1, dp_shard: AutoSize = "auto", dp_replicate: int = 1
) -> MeshSizes:
    """Checks the sizes against the number of processes and resolves ``dp_shard="auto"`` to what remains.

    Raises:
        ValueError: if a size is not a positive integer, or if the sizes do not multiply to ``world_size``.
    """
    _check_size("tp", tp)
    _check_size("cp", cp)
    _check_size("dp_replicate", dp_replicate)
    others = tp * cp * dp_replicate
    arithmetic = f"dp_replicate={dp_replicate} x cp={cp} x tp={tp} = {others}"
    if dp_shard == "auto":
        if world_size % others:
            raise ValueError(
                f"{arithmetic} does not divide the {world_size} processes of this run; start a multiple of {others} "
                f"processes (devices x num_nodes), or choose sizes whose product divides {world_size}"
            )
        dp_shard = world_size // others
    _check_size("dp_shard", dp_shard, auto=True)
    if dp_shard * others != world_size:
        raise ValueError(
            f"dp_shard={dp_shard} x {arithmetic.partition(' = ')[0]} = {dp_shard * others} does not equal the "
            f"{world_size} processes of this run; set devices x num_nodes to {dp_shard * others}, "
            'or dp_shard="auto" to take what remains'
        )
    return MeshSizes(dp_replicate=dp_replicate, dp_shard=dp_shard, cp=cp, tp=tp)


def build_mesh(sizes: MeshSizes, device_type: str) -> DeviceMesh:
    """Builds the four-axis mesh and its flattened axes. Collective: every process of the run calls it.

    Args:
        sizes: from :func:`resolve_sizes`.
        device_type: ``"cpu"`` or ``"cuda"``.
    """
    mesh = init_device_mesh(device_type, sizes.shape, mesh_dim_names=AXES)
    for name, axes in FLATTENED.items():
        mesh[axes]._flatten(name)
    return mesh


def axis(mesh: DeviceMesh, *names: str) -> DeviceMesh:
    """The sub-mesh of one or more axes; flattened names count.

    torch warns that slicing flattened axes will change; there is no replacement yet, so the warning is kept from users.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Slicing a flattened dim")
        return mesh[names if len(names) > 1 else names[0]]


def _check_size(name: str, size: object, auto: bool = False) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        allowed = 'a positive integer or "auto"' if auto else "a positive integer"
        raise ValueError(f"{name}={size!r} is not a size of a mesh axis; use {allowed} (1 turns the axis off)")
