"""Gradients between the micro-batches of an optimizer step, for checkpoints that are saved there.

FSDP2 keeps them unsharded and unreduced on each rank until the last micro-batch. They are saved as what the reduction
will make of them: sharded as the parameters, averaged over the data ranks. Restored as ``parameter.grad``, which FSDP2
adds the rest to, they are valid in any layout.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from lightning_automodel._compat.dtensor.tensors import dtensor_like
from lightning_automodel._compat.fsdp2.units import Pending, fsdp_units, holds_partial_sums, pending_gradients
from lightning_automodel.checkpointing.files.dcp import StoredTensor, fetch
from lightning_automodel.checkpointing.states import clean_name
from lightning_automodel.distributed.shards import local_tensor


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
    sharded: list[nn.Parameter] = [p for p in model.parameters() if isinstance(p, DTensor)]
    totals = {p: p.grad.detach().clone() for p in sharded if p.grad is not None}
    waiting = [each for unit in units for each in pending_gradients(unit)]
    for each in _of_any_rank([*waiting, *_plain(model, data_group)]):
        whole = _average(each.zeros() if each.gradient is None else each.gradient, each.groups)
        average = _like(each.parameter, each.cut(whole))
        total = totals.get(each.parameter)  # of micro-batches that were reduced
        totals[each.parameter] = average if total is None else total + average
    return {clean_name(name): totals[p] for name, p in model.named_parameters() if p in totals}


def _plain(model: nn.Module, data_group: ProcessGroup) -> Iterator[Pending]:
    for p in (p for p in model.parameters() if not isinstance(p, DTensor)):
        yield Pending(p, p.device, p.grad, partial(torch.zeros_like, p), lambda tensor: tensor, [data_group])


def _of_any_rank(found: list[Pending]) -> list[Pending]:
    """Leave out parameters of which no rank has a gradient. Which has one, samples may choose (heads, experts)."""
    if not found:
        return []
    there = torch.tensor([each.gradient is not None for each in found], dtype=torch.int32, device=found[0].device)
    dist.all_reduce(there, dist.ReduceOp.MAX)
    return [each for each, is_waiting in zip(found, there.tolist(), strict=True) if is_waiting]


def read_gradients(model: nn.Module, saved: Mapping[str, Any], scale: float = 1.0) -> dict[nn.Parameter, Tensor]:
    """Reads what :func:`collect_gradients` returned, times ``scale``, for ``model`` in any layout. Collective.

    They become valid as ``parameter.grad``, set before the next micro-batch.
    """
    gradients: dict[nn.Parameter, Tensor] = {}
    pairs: list[tuple[Tensor, StoredTensor | Tensor]] = []
    for name, parameter in model.named_parameters():
        if (value := saved.get(clean_name(name))) is not None:
            gradients[parameter] = torch.zeros_like(parameter, requires_grad=False)
            pairs.append((gradients[parameter], value))
    fetch(pairs)
    for gradient in gradients.values() if scale != 1 else ():
        local_tensor(gradient).mul_(scale)
    return gradients


def _average(gradient: Tensor, groups: list[ProcessGroup]) -> Tensor:
    dtype = torch.promote_types(gradient.dtype, torch.float32)  # on all ranks, whatever zeros are made like
    result = gradient.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)
    for group in groups:
        dist.all_reduce(result, group=group)
        result.div_(group.size())
    return result


def _like(parameter: nn.Parameter, local: Tensor) -> Tensor:
    local = local.to(parameter.device, parameter.dtype)
    return dtensor_like(local, parameter) if isinstance(parameter, DTensor) else local
