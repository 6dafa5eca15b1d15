"""Norm and clipping of gradients that are spread over a mesh, each parameter counted once."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_automodel._compat.torch.tensors import each_norm, multiply_

_EPSILON = 1e-6  # torch's own


def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scales gradients in place so that their total norm is at most ``max_norm``, as torch's function of that name.

    Args:
        parameters: whose ``.grad`` are tensors or DTensors, on any meshes.
        max_norm: the bound; ``inf`` measures only.
        norm_type: order of the norm; may be ``inf``.

    Returns:
        the norm before clipping: a scalar tensor in float32, equal on all ranks. No host synchronization.
    """
    grads = _gradients(parameters)
    norm = total_norm(grads, norm_type)
    scale_(grads, torch.clamp(max_norm / (norm + _EPSILON), max=1.0))
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
        multiply_(locals_, factor.to(device, torch.float32))


def total_norm(grads: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """Computes the norm of all ``grads`` taken as one vector: a scalar tensor in float32, equal on all ranks.

    One all-reduce per mesh. A gradient that several ranks hold counts once: its share is divided among them.

    Raises:
        ValueError: if the order is not positive.
    """
    _check_order(norm_type)
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
    for grad in grads:
        by_mesh.setdefault(grad.device_mesh if isinstance(grad, DTensor) else None, []).append(grad)
    parts = [_reduce(_local_power(g, norm_type), mesh, norm_type) for mesh, g in by_mesh.items()]
    if not parts:
        return torch.zeros(())
    device = parts[0].device
    stacked = torch.stack([part.to(device) for part in parts])
    return _root(stacked.max() if math.isinf(norm_type) else stacked.sum(), norm_type)


def get_grad_norm(
    parameters: Tensor | Iterable[Tensor],
    dp_cp_group: ProcessGroup | None,
    tp_group: ProcessGroup | None,
    norm_type: float = 2,
    dtype: torch.dtype = torch.float32,
) -> float:
    """Computes the norm of all gradients taken as one vector, for a loop of one's own. One host synchronization.

    Every element counts once, however many of the ranks of the two groups hold it: a DTensor's placements say how many
    do; a plain tensor is whole on each of them.

    Args:
        parameters: whose ``.grad`` are tensors, or DTensors on meshes inside of the two groups. A rank may hold empty
            shards, or no gradient at all.
        dp_cp_group: ranks of the data and context axes (``axis(mesh, DP_CP).get_group()``); ``None``: only this one.
        tp_group: ranks of the tensor-parallel axis (``axis(mesh, TP).get_group()``); ``None``: only this one.
        norm_type: order of the norm, positive; may be ``inf``.
        dtype: to compute in.

    Returns:
        the norm, equal on all ranks; 0.0 if there is no gradient.

    Raises:
        ValueError: if the order is not positive, or ranks outside of both groups hold parts of a gradient.
    """
    _check_order(norm_type)
    parameters = _as_list(parameters)
    if not parameters:
        return 0.0
    groups = [group for group in (dp_cp_group, tp_group) if group is not None]
    _check_groups(parameters, groups)
    ranks = math.prod(group.size() for group in groups)
    # A rank without gradients takes part in the sums: others may have some.
    total = torch.zeros((), device=to_local_if_dtensor(parameters[0]).device, dtype=dtype)
    if grads := _gradients(parameters):
        total = _local_power(grads, norm_type, lambda grad: ranks / _shards(grad), dtype).to(total.device)
    for group in groups:
        dist.all_reduce(total, _operation(norm_type), group=group)
    return float(_root(total, norm_type))


def clip_grad_by_total_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_grad_norm: float,
    total_norm: float,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Scales gradients in place so that their norm, which is known, becomes at most ``max_grad_norm``.

    Args:
        parameters: whose ``.grad`` are tensors or DTensors.
        max_grad_norm: the bound.
        total_norm: from :func:`get_grad_norm`. If it is NaN or infinite, gradients become NaN, as in torch.
        dtype: of the factor.
    """
    factor = max_grad_norm / (total_norm + _EPSILON)
    if not factor >= 1.0:
        scale_(_gradients(parameters), torch.tensor(factor, dtype=dtype))


def to_local_if_dtensor(tensor: Tensor) -> Tensor:
    """Returns this rank's shard of a DTensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _as_list(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def _gradients(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [p.grad for p in _as_list(parameters) if p.grad is not None]


def _local_power(
    grads: list[Tensor],
    norm_type: float,
    copies_of: Callable[[Tensor], float] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Computes this rank's term of ``sum(|g| ** norm_type)``, or the largest ``|g|`` for ``inf``.

    Elements are divided by how many ranks hold them: those of the gradient's mesh, unless ``copies_of`` says else.
    """
    by_copies: dict[float, list[Tensor]] = {}
    for grad in grads:
        by_copies.setdefault((copies_of or _copies)(grad), []).append(to_local_if_dtensor(grad))
    device = to_local_if_dtensor(grads[0]).device
    total = torch.zeros((), device=device, dtype=dtype)
    for copies, locals_ in by_copies.items():
        filled = [g for g in locals_ if g.numel()]  # a rank's shard may be empty
        filled = [_measurable(g, dtype) for g in filled]
        if not filled:
            continue
        norms = torch.stack([n.to(device) for n in each_norm(filled, norm_type, dtype=dtype)])
        if math.isinf(norm_type):
            total = torch.maximum(total, norms.max())
        else:
            total = total + (norms**norm_type).sum() / copies
    return total


def _measurable(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what torch measures in ``dtype``: no wider tensor, and the absolute values of complex ones."""
    grad = grad.abs() if grad.is_complex() else grad
    return grad.to(dtype) if grad.dtype == torch.float64 else grad


def _copies(grad: Tensor) -> int:
    """Counts the ranks of its mesh that hold each element of a gradient."""
    if not isinstance(grad, DTensor):
        return 1
    sizes = zip(grad.placements, grad.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if placement.is_replicate())


def _shards(grad: Tensor) -> int:
    """Counts the chunks in which the ranks of its mesh hold a gradient."""
    return grad.device_mesh.size() // _copies(grad) if isinstance(grad, DTensor) else 1


def _check_groups(parameters: list[Tensor], groups: list[ProcessGroup]) -> None:
    """Checks that every axis that cuts a gradient lies inside of a group, by parameters where there is no gradient: all
    ranks must find the same.
    """
    known = [set(dist.get_process_group_ranks(group)) for group in groups]
    held = [p if p.grad is None else p.grad for p in parameters]
    axes = {
        (tensor.device_mesh, axis)
        for tensor in held
        if isinstance(tensor, DTensor)
        for axis, placement in enumerate(tensor.placements)
        if not placement.is_replicate() and tensor.device_mesh.size(axis) > 1
    }
    for mesh, axis in axes:
        ranks = dist.get_process_group_ranks(mesh.get_group(axis))
        if not any(set(ranks) <= group for group in known):
            name = mesh.mesh_dim_names[axis] if mesh.mesh_dim_names else axis
            raise ValueError(
                f"the ranks {ranks} hold parts of a gradient (axis {name} of its mesh), but are not inside of "
                "dp_cp_group or tp_group, so the norm would lack what others hold; pass "
                "dp_cp_group=axis(mesh, DP_CP).get_group() and tp_group=axis(mesh, TP).get_group()"
            )


def _reduce(value: Tensor, mesh: DeviceMesh | None, norm_type: float) -> Tensor:
    if mesh is None:
        return value
    operation = _operation(norm_type)
    if mesh.size() == dist.get_world_size():
        dist.all_reduce(value, operation)
        return value
    for axis in range(mesh.ndim):
        if mesh.size(axis) > 1:
            dist.all_reduce(value, operation, group=mesh.get_group(axis))
    return value


def _operation(norm_type: float) -> Any:
    return dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM


def _root(total: Tensor, norm_type: float) -> Tensor:
    return total if math.isinf(norm_type) else total ** (1.0 / norm_type)


def _check_order(norm_type: float) -> None:
    if not norm_type > 0:
        raise ValueError(f"norm_type={norm_type} is not the order of a norm; use a positive number or inf")
