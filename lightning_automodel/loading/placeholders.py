"""Allocates weights that ``from_pretrained`` need not read on this rank: a checkpoint or another rank brings them."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lightning_automodel._compat.dtensor.tensors import dtensor_like
from lightning_automodel._compat.torch.modules import is_persistent, own_buffers, own_parameters
from lightning_automodel._compat.transformers.models import mark_as_initialized
from lightning_automodel.distributed.shards import local_tensor
from lightning_automodel.modules.structure import is_kept_in_float32


def reserve(model: PreTrainedModel, device: torch.device, missing: Iterable[str] = ()) -> None:
    """Allocate what a checkpoint of ``model`` holds on ``device``, without values, and mark it as initialized.

    Args:
        model: on the meta device, its parameters sharded or not.
        device: where the memory is.
        missing: names that stay as they are, for transformers to initialize.
    """
    left_out = set(missing)
    for prefix, module in model.named_modules():
        tables: tuple[dict[str, Any], ...] = (own_parameters(module), own_buffers(module))
        for values in tables:
            for name, value in values.items():
                full_name = f"{prefix}.{name}" if prefix else name
                is_stored = is_persistent(module, name) and full_name not in left_out
                if value is not None and value.is_meta and is_stored:
                    values[name] = _reserved(value, _dtype(model, full_name, value), device)
    model.tie_weights(recompute_mapping=False)


def copy_among_replicas(model: nn.Module, names: Iterable[str], group: ProcessGroup) -> None:
    """Overwrites the named parameters and buffers with those of the group's first rank, tensor by tensor."""
    state = model.state_dict(keep_vars=True)
    tensors = {id(tensor): tensor for name in names if isinstance(tensor := state.get(name), Tensor)}
    for tensor in tensors.values():
        dist.broadcast(local_tensor(tensor), group=group, group_src=0)


def broadcast_object(value: Any, group: ProcessGroup) -> Any:
    """Send a value of the group's first rank to the whole group."""
    values = [value]
    dist.broadcast_object_list(values, group=group, group_src=0)
    return values[0]


def _dtype(model: PreTrainedModel, name: str, value: Tensor) -> torch.dtype:
    keep = value.is_floating_point() and is_kept_in_float32(model, name)
    return torch.float32 if keep and value.dtype.itemsize < 4 else value.dtype


def _reserved(value: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    # Zeros: memory that is not written may hold NaN, and transformers unties what does not equal itself.
    local = torch.zeros_like(local_tensor(value), device=device, dtype=dtype)
    new: Tensor = local
    if isinstance(value, DTensor):
        new = dtensor_like(local, value)
    if isinstance(value, nn.Parameter):
        new = nn.Parameter(new, requires_grad=value.requires_grad)
        new.__dict__.update(value.__dict__)
    mark_as_initialized(new)
    return new
