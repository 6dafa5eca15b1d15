"""Averages the gradients of parameters that each rank holds whole, all of them by one all-reduce."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_automodel.strategies.own_parameters.plain import Plain


def averages(parameters: Sequence[Plain]) -> list[Tensor | None]:
    """Average the gradients of ``parameters`` over all ranks, in float32 at least; ``None`` where no rank has one."""
    if not parameters:
        return []
    given = [parameter.own_gradient for parameter in parameters]
    if dist.get_world_size() == 1:
        return given
    has = [gradient is not None for gradient in given]
    gradients = [_wide(torch.zeros_like(p) if g is None else g) for p, g in zip(parameters, given, strict=True)]
    marks = [torch.full((1,), float(there), device=parameters[0].device) for there in has]
    _average_each([*gradients, *marks])
    is_there = [mine or bool(mark) for mine, mark in zip(has, marks, strict=True)]
    return [g.to(p.dtype) if there else None for p, g, there in zip(parameters, gradients, is_there, strict=True)]


def _wide(gradient: Tensor) -> Tensor:
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    return gradient.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)


def _average_each(tensors: Iterable[Tensor]) -> None:
    """Average ``tensors`` in place, those of one dtype together."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).view(-1)
        by_dtype.setdefault(flat.dtype, []).append(flat)
    for parts in by_dtype.values():
        together = torch.cat(parts).div_(dist.get_world_size())
        dist.all_reduce(together)
        for part, average in zip(parts, together.split([part.numel() for part in parts]), strict=True):
            part.copy_(average)
