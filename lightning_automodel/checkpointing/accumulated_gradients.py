"""Gradients between the micro-batches of an optimizer step, for checkpoints that are saved there.

FSDP2 keeps them unsharded and unreduced on each rank until the last micro-batch. They are saved as what the reduction
will make of them: sharded as the parameters, averaged over the data ranks. Restored as ``parameter.grad``, which FSDP2
adds the rest to, they are valid in any layout.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from lightning_automodel._compat.dtensor import dtensor_like
from lightning_automodel._compat.fsdp2 import fsdp_units, holds_partial_sums, pending_gradients
from lightning_automodel.checkpointing.dcp import StoredTensor, fetch
from lightning_automodel.checkpointing.states import clean_name


def collect_gradients(model: nn.Module, data_group: ProcessGroup) -> dict[str, Tensor]:
    """Collects the gradients accumulated so far, by the names of parameters. Collective.

    Args:
        model: sharded by FSDP2, or with plain parameters that are the same on all ranks.
        data_group: ranks whose gradients are averaged, for parameters that FSDP2 does not hold.

    Raises:
        RuntimeError: if gradients were reduced within the replicas and wait for the reduction among them.
    """
    units = fsdp_units(model)
    if any(holds_partial_sums(unit) for unit in units):
        raise RuntimeError(
            "a checkpoint between the micro-batches of an optimizer step is not possible with dp_replicate > 1 and "
            "defer_fsdp_grad_sync=False; save after an optimizer step, or leave defer_fsdp_grad_sync at True"
        )
    unreduced = {
        parameter: cut(_average(gradient, *groups))
        for unit in units
        for parameter, gradient, cut, groups in pending_gradients(unit)
    }
    gradients: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        total = None if parameter.grad is None else parameter.grad.detach().clone()
        if isinstance(parameter, DTensor):
            if parameter in unreduced:
                total = _sum(total, _sharded_like(parameter, unreduced[parameter]))
        elif total is not None:
            total = _average(total, data_group)
        if total is not None:
            gradients[clean_name(name)] = total
    return gradients


def read_gradients(model: nn.Module, saved: Mapping[str, Any]) -> dict[nn.Parameter, Tensor]:
    """Reads what :func:`collect_gradients` returned, for ``model`` in any layout. Collective.

    They become valid as ``parameter.grad``, set before the next micro-batch.
    """
    gradients: dict[nn.Parameter, Tensor] = {}
    pairs: list[tuple[Tensor, StoredTensor | Tensor]] = []
    for name, parameter in model.named_parameters():
        if (value := saved.get(clean_name(name))) is not None:
            gradients[parameter] = torch.zeros_like(parameter, requires_grad=False)
            pairs.append((gradients[parameter], value))
    fetch(pairs)
    return gradients


def _average(gradient: Tensor, *groups: ProcessGroup) -> Tensor:
    result = gradient.detach().clone()
    for group in groups:
        dist.all_reduce(result, group=group)
        result.div_(group.size())
    return result


def _sum(one: Tensor | None, other: Tensor) -> Tensor:
    return other if one is None else one + other


def _sharded_like(parameter: DTensor, local: Tensor) -> Tensor:
    return dtensor_like(local.to(parameter.device, parameter.dtype), parameter)
