"""Turns sizes into the one device mesh that every stage shares, and names its axes.

The mesh always has four axes, outermost first, size 1 included::

    dp_replicate  x  dp_shard  x  cp  x  tp
    \\___________  __________/     |     |
                \\/                |     +-- one layer's matrices are split over it
                dp                +-------- one sequence is split over it
      who sees which samples

Four flattened axes serve the groups that span several of them: ``dp`` (which data), ``dp_shard_cp`` (what FSDP2 shards
over), ``dp_cp`` (what gradients are averaged over) and ``cp_tp`` (who computes one model on the same data).

Expert parallelism is a view of ``dp_shard_cp``, and no axis of its own: ``efsdp x ep``, ``ep`` innermost.
"""

import math
import warnings
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_automodel._compat.torch.gloo import gloo_in_order
from lightning_automodel._compat.torch.groups import flatten_axes, set_timeout, unflatten_axis
from lightning_automodel.distributed.kept_groups import keep

DP_REPLICATE, DP_SHARD, CP, TP = "dp_replicate", "dp_shard", "cp", "tp"
DP, DP_SHARD_CP, DP_CP, CP_TP = "dp", "dp_shard_cp", "dp_cp", "cp_tp"
EFSDP, EP = "efsdp", "ep"
EXPERTS = (EFSDP, EP)
AXES = (DP_REPLICATE, DP_SHARD, CP, TP)
FLATTENED = {
    DP: (DP_REPLICATE, DP_SHARD),
    DP_SHARD_CP: (DP_SHARD, CP),
    DP_CP: (DP_REPLICATE, DP_SHARD, CP),
    CP_TP: (CP, TP),
}

AutoSize = int | Literal["auto"]


@dataclass(frozen=True, kw_only=True)
class MeshSizes:
    """Resolved size of each axis of the mesh, in processes; ``ep`` of them, of ``dp_shard x cp``, exchange tokens."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def world(self) -> int:
        """Count the processes."""
        return math.prod(self.shape)

    @property
    def data(self) -> int:
        """Count the ranks that see different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Sizes in the order of :data:`AXES`."""
        return (self.dp_replicate, self.dp_shard, self.cp, self.tp)


def resolve_sizes(
    world_size: int, *, tp: int = 1, cp: int = 1, ep: int = 1, dp_shard: AutoSize = "auto", dp_replicate: int = 1
) -> MeshSizes:
    """Checks the sizes against the number of processes and resolves ``dp_shard="auto"`` to what remains.

    Raises:
        ValueError: if a size is not a positive integer, if the sizes do not multiply to ``world_size``, or if ``ep``
            does not divide ``dp_shard x cp``.
    """
    _check_size("tp", tp)
    _check_size("ep", ep)
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
    if dp_shard * cp % ep:
        fitting = ", ".join(str(n) for n in range(1, dp_shard * cp + 1) if dp_shard * cp % n == 0)
        raise ValueError(
            f"ep={ep} does not divide dp_shard={dp_shard} x cp={cp} = {dp_shard * cp}: the ranks that shard the "
            f"parameters exchange tokens in groups of ep; use one of {fitting}, or another dp_shard"
        )
    return MeshSizes(dp_replicate=dp_replicate, dp_shard=dp_shard, cp=cp, tp=tp, ep=ep)


def build_mesh(sizes: MeshSizes, device_type: str, timeout: timedelta | None = None) -> DeviceMesh:
    """Builds the four-axis mesh and its flattened axes. Collective: every process of the run calls it.

    Args:
        sizes: from :func:`resolve_sizes`.
        device_type: ``"cpu"`` or ``"cuda"``.
        timeout: of collectives over each axis; ``None``: torch's default.

    Raises:
        RuntimeError: for ``ep``, if this torch has no axes of a part of the mesh.
    """
    with gloo_in_order():
        mesh = init_device_mesh(device_type, sizes.shape, mesh_dim_names=AXES)
        for name, axes in FLATTENED.items():
            flatten_axes(mesh[axes], name)
        if sizes.ep > 1:
            _add_expert_axes(mesh, sizes)
    if timeout is not None:
        for name in names_of_axes(mesh):
            set_timeout(axis(mesh, name).get_group(), timeout)
    return mesh


def _add_expert_axes(mesh: DeviceMesh, sizes: MeshSizes) -> None:
    unflatten_axis(axis(mesh, DP_SHARD_CP), {EFSDP: sizes.dp_shard * sizes.cp // sizes.ep, EP: sizes.ep})
    try:
        axis(mesh, EP)
    except NotImplementedError as error:
        raise RuntimeError(f"{' and '.join(EXPERTS)}: axes of a part of the mesh need torch 2.13 or newer") from error


def names_of_axes(mesh: DeviceMesh) -> tuple[str, ...]:
    """Name the axes of a mesh of :func:`build_mesh`, the flattened ones and those of experts after its own four."""
    return (*AXES, *FLATTENED, *(name for name in EXPERTS if _has_axis(mesh, name)))


def share_mesh(sizes: MeshSizes, device_type: str, timeout: timedelta | None = None) -> DeviceMesh:
    """Build the mesh once for all trainers of these sizes that follow one another in these processes."""
    return keep(("mesh", sizes, device_type, timeout), lambda: build_mesh(sizes, device_type, timeout))


def axis(mesh: DeviceMesh, *names: str) -> DeviceMesh:
    """Returns the sub-mesh of one or more axes; flattened names count.

    torch warns that slicing flattened axes will change; there is no replacement yet, so the warning is kept from users.

    Raises:
        KeyError: for a name that is none of an axis.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Slicing a flattened dim")
        return mesh[names if len(names) > 1 else names[0]]


@dataclass(frozen=True, kw_only=True)
class AxisNames:
    """What the axes that the parallelizer works on are called, in a mesh that a user made."""

    dp_replicate: str = DP_REPLICATE
    dp_shard_cp: str = DP_SHARD_CP
    tp: str = TP


@dataclass(frozen=True, kw_only=True)
class Axes:
    """The sub-meshes that the stages work on.

    Attributes:
        tp: over which matrices are split.
        data: over which parameters are sharded or replicated; of one axis, or of two, replicas first (hybrid sharding).
        cp: over which sequences are cut, a part of ``data``; ``None``: they are whole.
        experts: over which tokens travel to experts; ``None``: experts come to the tokens.
    """

    tp: DeviceMesh
    data: DeviceMesh
    cp: DeviceMesh | None = None
    experts: "ExpertAxes | None" = None


@dataclass(frozen=True, kw_only=True)
class ExpertAxes:
    """The data ranks as expert parallelism sees them: rank ``i * ep + j`` of a shard group is ``(efsdp=i, ep=j)``.

    Attributes:
        ep: whose ranks exchange tokens.
        data: over which the experts of one ep rank are sharded; of one axis, or of two, replicas first.
    """

    ep: DeviceMesh
    data: DeviceMesh

    @property
    def shards(self) -> int:
        """Count the ranks that store all experts together."""
        return self.ep.size() * self.data.size(self.data.ndim - 1)


def find_axes(mesh: DeviceMesh, names: AxisNames) -> Axes:
    """Finds the sub-meshes for tensor parallelism and for FSDP2.

    Args:
        mesh: from :func:`build_mesh`, or any other with axes of these names, flattened ones included.
        names: ``dp_replicate`` may be missing in the mesh.

    Returns:
        the tp axis, and ``dp_shard_cp`` or ``(dp_replicate, dp_shard_cp)`` as that of the data.

    Raises:
        ValueError: if an axis is missing, or if the mesh has ranks that none of the axes separates.
    """
    missing = [name for name in (names.dp_shard_cp, names.tp) if not _has_axis(mesh, name)]
    if missing:
        raise ValueError(
            f"the device mesh has the axes {mesh.mesh_dim_names}, and none is called {' or '.join(missing)}; pass the "
            "names of its axes, or give it an axis of size 1: "
            f'init_device_mesh("cuda", (1, 8), mesh_dim_names=("{names.dp_shard_cp}", "{names.tp}"))'
        )
    tp, shard = axis(mesh, names.tp), axis(mesh, names.dp_shard_cp)
    replicas = axis(mesh, names.dp_replicate).size() if _has_axis(mesh, names.dp_replicate) else 1
    if replicas * shard.size() * tp.size() != mesh.size():
        raise ValueError(
            f"the device mesh {mesh.mesh_dim_names} has {mesh.size()} ranks, but {names.dp_replicate}={replicas} x "
            f"{names.dp_shard_cp}={shard.size()} x {names.tp}={tp.size()} make {replicas * shard.size() * tp.size()}: "
            "an axis would be left out; pass its name"
        )
    data = axis(mesh, names.dp_replicate, names.dp_shard_cp) if replicas > 1 else shard
    cp = axis(mesh, CP) if _has_axis(mesh, CP) else None
    return Axes(tp=tp, data=data, cp=cp, experts=_expert_axes(mesh, names.dp_replicate if replicas > 1 else None))


def _expert_axes(mesh: DeviceMesh, replicas: str | None) -> ExpertAxes | None:
    if not all(_has_axis(mesh, name) for name in EXPERTS) or axis(mesh, EP).size() == 1:
        return None
    return ExpertAxes(ep=axis(mesh, EP), data=axis(mesh, replicas, EFSDP) if replicas else axis(mesh, EFSDP))


def _has_axis(mesh: DeviceMesh, name: str) -> bool:
    """Tells whether the mesh knows the axis; flattened ones are not in ``mesh_dim_names``."""
    try:
        axis(mesh, name)
    except KeyError:
        return False
    return True


def _check_size(name: str, size: object, auto: bool = False) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        allowed = 'a positive integer or "auto"' if auto else "a positive integer"
        raise ValueError(f"{name}={size!r} is not a size of a mesh axis; use {allowed} (1 turns the axis off)")
