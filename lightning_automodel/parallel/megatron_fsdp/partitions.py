"""Which rank holds what of the shards of Megatron-FSDP: rows of slices of tensor parallelism, in uneven numbers."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from lightning_automodel._compat.dtensor.operations import refuse_gathering, watch_pairs, watch_reductions
from lightning_automodel.distributed.boxes import Box, boxes_at
from lightning_automodel.distributed.uneven_shards import Partition, set_partition
from lightning_automodel.gradients import to_local_if_dtensor
from lightning_automodel.parallel.draws.whole import refuse_draws
from lightning_automodel.parallel.megatron_fsdp.plain import Slice

_NOT_GATHERED = (
    "a parameter or gradient that Megatron-FSDP shards is needed whole (by full_tensor(), a median, a product): its "
    "ranks hold rows in uneven numbers, which torch cannot gather; a checkpoint has whole tensors, and under "
    "FSDP2TPStrategy full_tensor() and such operations work"
)


def refuse_operations(mesh: DeviceMesh, dp: int, tp: int) -> None:
    """Refuse what of shards in uneven numbers would be wrong, or would hang."""
    if dp * tp > 1:
        refuse_draws(mesh)
    if dp > 1:
        refuse_gathering(mesh, _NOT_GATHERED)


_CUT: dict[DeviceMesh, set[torch.Size]] = {}


def refuse_reductions(mesh: DeviceMesh, shapes: set[torch.Size]) -> None:
    """Refuse sums, means, maxima and norms of tensors over ``mesh`` that have a shape of ``shapes``: those of slices of
    tensor parallelism, of which the mesh does not know. What code asks the strategy for is computed elsewhere.
    """
    _CUT[mesh] = shapes
    watch_reductions(_refuse_of_slices)


def _refuse_of_slices(tensor: DTensor) -> None:
    if tensor.shape in _CUT.get(tensor.device_mesh, ()):
        raise ValueError(
            f"a sum, mean, maximum or norm of a tensor of shape {tuple(tensor.shape)}, which tp has cut, would be that "
            "of this rank's part: Megatron-FSDP knows the data ranks alone; take the norm of a gradient or parameter "
            "itself in a hook (p.grad.norm()), clip by self.clip_gradients(optimizer), or use FSDP2TPStrategy, where "
            "such numbers are those of whole tensors"
        )


_ROWS: dict[tuple[DeviceMesh, torch.Size], set[tuple[int, ...]]] = {}
"""Numbers of rows on the ranks, of all models so far: a copy may be sharded by a call of its own."""


def _refuse_unlike_rows(rows: Mapping[DTensor, tuple[int, ...]]) -> None:
    """Refuse what would combine tensors of one shape of which this rank holds other rows, perhaps by broadcasting.

    The library lays what trains of a unit (or of all that is outside of units) into one buffer, and what is frozen
    into another, and cuts each in the middle. Four rows of a, eight of b, four of c::

                                      GPU 0                 GPU 1
        all of them frozen            a 0-3, b 0-3          b 4-7, c 0-3
        a and c train, b is frozen    a 0-3, b 0-3          c 0-3, b 4-7
        a and b train, c is frozen    a 0-3, b 0-1, c 0-1   b 2-7, c 2-3
    """
    for parameter, each in rows.items():
        _ROWS.setdefault((parameter.device_mesh, parameter.shape), set()).add(each)
    if any(len(each) > 1 for each in _ROWS.values()):
        watch_pairs(_refuse_pairs)


def _refuse_pairs(tensors: list[DTensor]) -> None:
    if len(tensors) < 2 or len(_ROWS.get((tensors[0].device_mesh, tensors[0].shape), ())) < 2:
        return
    first, *others = tensors
    held = count_rows(first)
    for other in others:
        if other.shape == first.shape and other.placements == first.placements and count_rows(other) != held:
            raise ValueError(
                f"two tensors of shape {tuple(first.shape)} that Megatron-FSDP shards are combined, of which this rank "
                f"holds {held} rows and {count_rows(other)}: parameters that train and frozen ones are cut apart, and "
                "so a model with some frozen layers has other rows than its copy. To average weights, use Lightning's "
                "EMAWeightAveraging, or keep parameter.detach().clone() of each; or use FSDP2TPStrategy"
            )


def describe_shards(
    parameters: Mapping[str, Tensor],
    slices: Mapping[str, Slice | None],
    raw: Mapping[str, Tensor],
    dp_mesh: DeviceMesh,
    tp_mesh: DeviceMesh,
    is_sharded: bool,
) -> tuple[dict[str, int], dict[Tensor, int]]:
    """Tells checkpoints where each parameter's rows are. Collective.

    Args:
        parameters: those of the optimizer, by name.
        slices: what each is of the whole one; ``None`` for one that is whole on every rank of tp.
        raw: those that compute, by the same names.
        dp_mesh: ranks that share the parameters.
        tp_mesh: ranks that hold slices.
        is_sharded: over ``dp_mesh``; else all of its ranks hold the same.

    Returns:
        where this rank's rows begin, by name, and how many ranks hold what it holds.
    """
    mine = {name: count_rows(p) for name, p in parameters.items()}
    rows = _gather(_gather(mine, dp_mesh), tp_mesh)  # by place on tp, on dp, and name
    ranks = _gather(dist.get_process_group_ranks(tp_mesh.get_group()), dp_mesh)
    copies: dict[Tensor, int] = {}
    for name, parameter in parameters.items():
        found = slices[name]
        shape = torch.Size(found.shape if found else raw[name].shape)
        placement = found.placement if found else Replicate()
        by_tp = [[each[name] for each in by_dp] for by_dp in rows]
        partition = _partition(shape, placement, by_tp, ranks, dp_mesh, tp_mesh, is_sharded)
        set_partition(parameter, partition)
        copies[parameter] = partition.copies
    own = rows[tp_mesh.get_local_rank()]
    if is_sharded and dp_mesh.size() > 1:
        _refuse_unlike_rows(
            {p: tuple(each[name] for each in own) for name, p in parameters.items() if isinstance(p, DTensor)}
        )
    before = own[: dp_mesh.get_local_rank()] if is_sharded else []
    return {name: sum(each[name] for each in before) for name in parameters}, copies


def _partition(
    shape: torch.Size,
    placement: Placement,
    rows: list[list[int]],
    ranks: list[list[int]],
    dp_mesh: DeviceMesh,
    tp_mesh: DeviceMesh,
    is_sharded: bool,
) -> Partition:
    tp, dp = tp_mesh.size(), dp_mesh.size()
    by_tp = [boxes_at(shape, (tp,), (placement,), (i,)) for i in range(tp)]
    starts = [[sum(by_dp[:i]) if is_sharded else 0 for i in range(dp)] for by_dp in rows]
    parts = {
        (d, t): [cut for box in by_tp[t] if (cut := _cut(box, starts[t][d], rows[t][d]))]
        for d in range(dp)
        for t in range(tp)
    }
    tp_once = [0] if placement.is_replicate() else range(tp)
    dp_once = range(dp) if is_sharded else [0]
    d, t = dp_mesh.get_local_rank(), tp_mesh.get_local_rank()
    copies, index = 1, 0
    if placement.is_replicate():
        copies, index = tp, t
    if not is_sharded:
        copies, index = copies * dp, index * dp + d
    return Partition(
        shape=shape,
        mine=parts[d, t],
        holders=[(ranks[i][j], parts[i, j]) for i in dp_once for j in tp_once],
        copies=copies,
        index=index,
    )


def count_rows(parameter: Tensor) -> int:
    """Counts the rows that this rank holds."""
    local = to_local_if_dtensor(parameter.detach())
    return local.shape[0] if local.numel() and local.ndim else 0


def _gather(value: Any, mesh: DeviceMesh) -> list[Any]:
    """Gathers what each rank of an axis passes, in order. Collective."""
    values: list[Any] = [None] * mesh.size()
    dist.all_gather_object(values, value, group=mesh.get_group())
    return values


def _cut(box: Box, start: int, count: int) -> Box | None:
    """Cuts a box to ``count`` rows of the rank's slice, from row ``start`` on."""
    first = max(box.local_offsets[0], start)
    last = min(box.local_offsets[0] + box.sizes[0], start + count)
    if first >= last:
        return None
    return Box(
        offsets=(box.offsets[0] + first - box.local_offsets[0], *box.offsets[1:]),
        local_offsets=(first - start, *box.local_offsets[1:]),
        sizes=(last - first, *box.sizes[1:]),
    )
