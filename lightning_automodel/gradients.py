"""Norm and clipping of gradients that are spread over a mesh, each parameter counted once."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def clip_grad_norm_(parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scales gradients in place so that their total norm is at most ``max_norm``, as torch's function of that name.

    Args:
        parameters: whose ``.grad`` are tensors or DTensors, on any meshes.
        max_norm: the bound; ``inf`` measures only.
        norm_type: order of the norm; may be ``inf``.

    Returns:
        the norm before clipping: a scalar tensor in float32, equal on all ranks. No host synchronization.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = total_norm(grads, norm_type)
    scale_(grads, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm


def scale_(gradients: Iterable[Tensor], factor: Tensor) -> None:
    """Multiplies ``gradients`` in place, DTensors on each rank's shard.

    Args:
        gradients: of any dtypes, on any devices.
        factor: a scalar tensor, equal on all ranks; kept in float32, also where gradients are narrower.
    """
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        local = to_local_if_dtensor(gradient)
        by_kind.setdefault((local.device, local.dtype), []).append(local)
    for (device, _), locals_ in by_kind.items():
        torch._foreach_mul_(locals_, factor.to(device, torch.float32))


def total_norm(grads: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norm of all ``grads`` taken as one vector: a scalar tensor in float32, equal on all ranks.

    One all-reduce per mesh. A gradient that several ranks hold counts once: its share is divided among them.
    """
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
    for grad in grads:
        by_mesh.setdefault(grad.device_mesh if isinstance(grad, DTensor) else None, []).append(grad)
    parts = [_reduce(_local_power(g, norm_type), mesh, norm_type) for mesh, g in by_mesh.items()]
    if not parts:
        return torch.zeros(())
    device = parts[0].device
    stacked = torch.stack([part.to(device) for part in parts])
    return stacked.max() if math.isinf(norm_type) else stacked.sum() ** (1.0 / norm_type)


def to_local_if_dtensor(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _local_power(grads: list[Tensor], norm_type: float) -> Tensor:
    """This rank's share of ``sum(|g| ** norm_type)``, or the largest ``|g|`` for ``inf``."""
    by_copies: dict[int, list[Tensor]] = {}
    for grad in grads:
        by_copies.setdefault(_copies(grad), []).append(to_local_if_dtensor(grad))
    device = to_local_if_dtensor(grads[0]).device
    total = torch.zeros((), device=device)
    for copies, locals_ in by_copies.items():
        filled = [g for g in locals_ if g.numel()]  # a rank's shard may be empty
        if not filled:
            continue
        norms = torch.stack([n.to(device) for n in torch._foreach_norm(filled, norm_type, dtype=torch.float32)])
        if math.isinf(norm_type):
            total = torch.maximum(total, norms.max())
        else:
            total = total + (norms**norm_type).sum() / copies
    return total


def _copies(grad: Tensor) -> int:
    """How many ranks of its mesh hold each element of a gradient."""
    if not isinstance(grad, DTensor):
        return 1
    sizes = zip(grad.placements, grad.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if placement.is_replicate())


def _reduce(value: Tensor, mesh: DeviceMesh | None, norm_type: float) -> Tensor:
    if mesh is None:
        return value
    op = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
    if mesh.size() == dist.get_world_size():
        dist.all_reduce(value, op)
        return value
    for axis in range(mesh.ndim):
        if mesh.size(axis) > 1:
            dist.all_reduce(value, op, group=mesh.get_group(axis))
    return value
