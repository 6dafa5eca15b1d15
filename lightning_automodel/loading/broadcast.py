"""Broadcasts a tensor from rank 0 to all."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


def broadcast(tensor: Tensor, mesh: DeviceMesh) -> None:
    """Overwrites ``tensor`` with rank 0's, through the device that the mesh communicates on."""
    if dist.get_world_size() == 1 or tensor.numel() == 0:
        return
    device = torch.device(mesh.device_type, torch.cuda.current_device()) if mesh.device_type == "cuda" else "cpu"
    staged = tensor.to(device).contiguous()
    dist.broadcast(staged, src=0)
    tensor.copy_(staged)
