"""Finds the boxes of a whole tensor that this rank holds, and gathers whole tensors on rank 0 by them."""

import itertools
import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from lightning_automodel.distributed.boxes import Box, boxes_at
from lightning_automodel.distributed.uneven_shards import Fragment


def boxes_of(tensor: Tensor) -> list[Box]:
    """Computes the boxes that this rank holds of ``tensor``; a plain tensor is one. Empty boxes are left out."""
    if isinstance(tensor, Fragment):
        return list(tensor.partition.mine)
    if not isinstance(tensor, DTensor):
        zeros = (0,) * tensor.ndim
        return [Box(offsets=zeros, local_offsets=zeros, sizes=tuple(tensor.shape))]
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    found = boxes_at(tensor.shape, tensor.device_mesh.shape, tensor.placements, coordinate)
    size = sum(math.prod(box.sizes) for box in found)
    assert size == local_tensor(tensor).numel(), f"{tensor.shape} as {tensor.placements}: {local_tensor(tensor).shape}"
    return found


def local_tensor(tensor: Tensor) -> Tensor:
    """Returns the memory that this rank holds of ``tensor``, outside of autograd."""
    if isinstance(tensor, Fragment):
        return tensor.local
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def place_among_replicas(tensor: Tensor) -> tuple[int, int]:
    """Count the ranks that hold the same as this one, and find the place of this rank among them."""
    if isinstance(tensor, Fragment):
        return tensor.partition.copies, tensor.partition.index
    if not isinstance(tensor, DTensor):
        return (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    copies, index = 1, 0
    for size, place, placement in zip(tensor.device_mesh.shape, coordinate, tensor.placements, strict=True):
        if placement.is_replicate():
            copies, index = copies * size, index * size + place
    return copies, index


def copy_from_whole(target: Tensor, whole: Tensor) -> None:
    """Overwrites what this rank holds of ``target`` with its part of ``whole``, which may be a memory-mapped file.

    Raises:
        ValueError: if the shapes differ.
    """
    if target.shape != whole.shape:
        raise ValueError(f"a tensor of shape {tuple(whole.shape)} does not fit into one of {tuple(target.shape)}")
    local = local_tensor(target)
    for box in boxes_of(target):
        box.of_local(local).copy_(box.of_whole(whole))


def gather_on_rank_zero(tensor: Tensor) -> Tensor | None:
    """Gathers the whole tensor on the CPU of rank 0, ``None`` on the others. Collective over the ranks that hold it."""
    if isinstance(tensor, Fragment):
        return _collect(tensor, tensor.partition.holders, tensor.device.type)
    if not isinstance(tensor, DTensor):
        return tensor.detach().cpu() if dist.get_rank() == 0 else None
    boxes_of(tensor)  # checks that the local tensor is what the mesh says: else ranks would wait for one another
    mesh = tensor.device_mesh
    holders = [
        (int(mesh.mesh[coordinate]), boxes_at(tensor.shape, mesh.shape, tensor.placements, coordinate))
        for coordinate in _holders(mesh.shape, tensor.placements)
    ]
    return _collect(tensor, holders, mesh.device_type)


def _collect(tensor: Tensor, holders: Iterable[tuple[int, Sequence[Box]]], device_type: str) -> Tensor | None:
    local = local_tensor(tensor)
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") if dist.get_rank() == 0 else None
    for rank, found in holders:
        part = _send_to_zero(local, rank, local_shape(found, tensor.ndim), device_type) if found else None
        if whole is not None and part is not None:
            for box in found:
                box.of_whole(whole).copy_(box.of_local(part))
    return whole


def _send_to_zero(local: Tensor, source: int, shape: Sequence[int], device_type: str) -> Tensor | None:
    """Sends to rank 0 what rank ``source`` passes as ``local``."""
    if dist.get_rank() not in (0, source):
        return None
    if source == 0:
        return local
    if dist.get_rank() == source:
        dist.send(local.to(device_type).contiguous(), dst=0)
        return None
    received = torch.empty(tuple(shape), dtype=local.dtype, device=device_type)
    dist.recv(received, src=source)
    return received


def _holders(mesh_shape: Sequence[int], placements: Sequence[Placement]) -> Iterable[tuple[int, ...]]:
    """Find coordinates of ranks that hold the whole tensor between them, each shard once."""
    sizes = (1 if p.is_replicate() else size for size, p in zip(mesh_shape, placements, strict=True))
    return itertools.product(*map(range, sizes))


def local_shape(found: Sequence[Box], ndim: int) -> list[int]:
    """Compute the shape of the local tensor that consists of these boxes; zeros where there are none."""
    if not found:
        return [0] * ndim
    return [max(box.local_offsets[dim] + box.sizes[dim] for box in found) for dim in range(ndim)]
