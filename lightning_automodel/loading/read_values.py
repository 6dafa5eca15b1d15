"""Finds what code behind ``from_pretrained`` has changed of the plain parameters that were read from files.

A frozen base below adapters is in no checkpoint, because it lies in files; what ``configure_model`` makes of it (an
adapter that is merged, weights that are scaled, more tokens) does not. Sharded parameters tell by themselves
(:mod:`lightning_automodel.loading.whole_values`). Of plain ones a sum is taken when they were read, and once more when
``configure_model`` has returned::

    read, on its device --> sum of bits --> merge_and_unload, get_peft_model, float() --> sum of bits, in the dtype read
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_automodel.modules.adapted_bases import forget_files_below, names_from_files
from lightning_automodel.modules.wrappers import is_wrapper, name_without_wrappers

_READ = "_values_that_were_read"
_WORDS = 1021
"""A prime, so that rows of no usual length change places unnoticed."""

_Sum = tuple[torch.dtype, torch.Size, Tensor]


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
    compared = {
        f"{prefix}.{name}" if prefix else name: is_like
        for prefix, model in module.named_modules()
        if (sums := vars(model).pop(_READ, None)) is not None and any(map(is_wrapper, model.modules()))
        for name, is_like in _compared(model, sums).items()
    }
    changed = [name for name, is_like in compared.items() if not is_like]
    if dist.is_initialized():
        found: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(found, changed)
        changed = sorted({name for names in found for name in names})
    forget_files_below(module, changed)


def _compared(model: nn.Module, sums: Mapping[str, _Sum]) -> dict[str, bool]:
    """Tell of each plain parameter in the place of one that was read whether it has the same values."""
    names, found = names_from_files(model), {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = name_without_wrappers(name)
        if first not in names or ".modules_to_save." in name or isinstance(parameter, DTensor) or parameter.is_meta:
            continue
        found[name] = _differs(parameter, sums[first]) if first in sums else None
    known = {name: differs for name, differs in found.items() if differs is not None}
    differ = torch.stack(list(known.values())).tolist() if known else []
    return {name: False for name in found} | {n: not d for n, d in zip(known, differ, strict=True)}


def _differs(parameter: Tensor, read: _Sum) -> Tensor | None:
    """Compare, without a wait for the device; ``None`` if the shape tells."""
    dtype, shape, total = read
    return _sum_of(parameter.detach().to(dtype))[2].to(total.device) != total if parameter.shape == shape else None


def _sum_of(tensor: Tensor) -> _Sum:
    """Add the bits of ``tensor`` up, eight bytes at a time, neighbours with other factors: int64, a scalar."""
    flat = tensor.detach().contiguous().flatten().view(torch.uint8)
    flat = flat if flat.storage_offset() % 8 == 0 else flat.clone()
    words = flat[: flat.numel() // 8 * 8].view(torch.int64)
    if tensor.dtype.itemsize >= 8:  # signs and exponents alone are high bits, of which an even number adds up to none
        words = words ^ (words >> 32)
    many = len(words) // _WORDS * _WORDS
    of_many, others = words[:many].view(-1, _WORDS).sum(0), torch.cat([words[many:], flat[8 * len(words) :].long()])
    return tensor.dtype, tensor.shape, _weighted(of_many) + _weighted(others)


def _weighted(words: Tensor) -> Tensor:
    return (words * torch.arange(1, 2 * len(words) + 1, 2, device=words.device)).sum()
