"""Finds what code behind ``from_pretrained`` has changed of the plain parameters that were read from files.

A frozen base below adapters is in no checkpoint, because it lies in files; what ``configure_model`` makes of it (an
adapter that is merged, weights that are scaled, more tokens) does not. Sharded parameters tell by themselves
(:mod:`lightning_automodel.loading.whole_values`). Of plain ones a sum is taken when they were read, and once more when
``configure_model`` has returned::

    read, on its device --> sum of bits --> merge_and_unload, get_peft_model, float() --> sum of bits, in the dtype read
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_automodel.distributed.agreement import names_of_any_rank
from lightning_automodel.modules.adapted_bases import forget_files_below, names_from_files
from lightning_automodel.modules.wrappers import is_wrapper, name_without_wrappers

_READ = "_values_that_were_read"
_WORDS = 1021
"""A prime, so that rows of no usual length change places unnoticed."""


class _Sum(NamedTuple):
    dtype: torch.dtype
    shape: torch.Size
    total: Tensor


def note_values(model: nn.Module) -> None:
    """Keep a sum of every plain parameter that ``model`` has from files. No wait for the device."""
    names = names_from_files(model)
    sums: dict[nn.Parameter, _Sum] = {}
    found: dict[str, _Sum] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in names and not isinstance(parameter, DTensor):
            found[name] = sums[parameter] if parameter in sums else _sum_of(parameter)
            sums[parameter] = found[name]
    vars(model)[_READ] = found


def forget_changed(module: nn.Module) -> None:
    """Forget the file of each plain parameter below ``module`` that any rank has changed since. Collective.

    Before parameters are cast or cut by the strategy; the first time that it is called for a model counts. Without
    adapters nothing is left out of checkpoints, and nothing compared.
    """
    changed = [
        f"{prefix}.{name}" if prefix else name
        for prefix, model in module.named_modules()
        if (sums := vars(model).pop(_READ, None)) is not None and any(map(is_wrapper, model.modules()))
        for name in _changed(model, sums)
    ]
    forget_files_below(module, names_of_any_rank(changed))


def _changed(model: nn.Module, sums: Mapping[str, _Sum]) -> list[str]:
    """Name the plain parameters in the places of those that were read, which have other values."""
    names, others, differs = names_from_files(model), [], {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = name_without_wrappers(name)
        if first not in names or ".modules_to_save." in name or isinstance(parameter, DTensor) or parameter.is_meta:
            continue
        if (read := sums.get(first)) is None or read.shape != parameter.shape:
            others.append(name)
        else:
            differs[name] = _sum_of(parameter.detach().to(read.dtype)).total.to(read.total.device) != read.total
    told = torch.stack(list(differs.values())).tolist() if differs else []  # one wait for the device
    return others + [name for name, differ in zip(differs, told, strict=True) if differ]


def _sum_of(tensor: Tensor) -> _Sum:
    """Add the bits of ``tensor`` up, eight bytes at a time, neighbours with other factors: int64, a scalar."""
    flat = tensor.detach().contiguous().flatten().view(torch.uint8)
    flat = flat if flat.storage_offset() % 8 == 0 else flat.clone()
    words = flat[: flat.numel() // 8 * 8].view(torch.int64)
    if tensor.dtype.itemsize >= 8:  # signs and exponents alone are high bits, of which an even number adds up to none
        words = words ^ (words >> 32)
    many = len(words) // _WORDS * _WORDS
    of_many, others = words[:many].view(-1, _WORDS).sum(0), torch.cat([words[many:], flat[8 * len(words) :].long()])
    return _Sum(tensor.dtype, tensor.shape, _weighted(of_many) + _weighted(others))


def _weighted(words: Tensor) -> Tensor:
    return (words * torch.arange(1, 2 * len(words) + 1, 2, device=words.device)).sum()
