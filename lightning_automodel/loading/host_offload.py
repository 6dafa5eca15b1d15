"""Keeps parameters on the host: FSDP2 gathers a unit on the device, and the optimizer steps on the host."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import OffloadPolicy
from torch.distributed.tensor import DTensor

from lightning_automodel._compat.dtensor.tensors import change_tensors, is_offloaded
from lightning_automodel.config import resolve_offload_policy

BACKEND = "cuda:nccl,cpu:gloo"
"""What communicates on CUDA when shards are on the host."""


def offload_policy_for(policy: Any, device_type: str) -> OffloadPolicy:
    """Makes FSDP2's policy object for a mesh of ``device_type``.

    On CPU, where nothing moves, memory is not pinned: there is no device that would read it.

    Raises:
        ValueError: if the process group cannot communicate on the host.
    """
    resolved = resolve_offload_policy(policy)
    if resolved is None:
        return OffloadPolicy()
    if device_type == "cpu":
        return replace(resolved, pin_memory=False)
    backends = dist.get_backend_config()
    if "cpu:" not in backends:
        raise ValueError(
            f"offload_policy={policy!r} clips and saves gradients and parameters on the host, where the process group "
            f'({backends}) cannot communicate; leave backend at None, or use "{BACKEND}"'
        )
    return resolved


def home_of(model: nn.Module, device: torch.device) -> torch.device:
    """Returns the device of the shards of ``model``, which computes on ``device``."""
    return torch.device("cpu") if is_offloaded(model) else device


def move(model: nn.Module, device: torch.device) -> None:
    """Moves parameters and buffers to ``device``; shards that wait on the host stay there."""
    if is_offloaded(model):
        change_tensors(model, lambda tensor: tensor if _is_shard(tensor) else tensor.to(device))
    else:
        model.to(device)


def _is_shard(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor)
