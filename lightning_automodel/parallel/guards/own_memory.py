"""Sees to memory of their own for parameters that are about to be sharded, and refuses those that share theirs.

::

    one process    a = Parameter(w)    b = Parameter(w.t())    a step of the optimizer on a moves b, and the other way
    shards         a, copied           b, copied               each goes its own way from the first step on
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor, nn


def give_own_memory(model: nn.Module) -> None:
    """Lay the parameters of ``model`` out row by row, in place: shards are of rows.

    One parameter under two names is no sharing; nor are views that do not overlap, and frozen tensors among themselves.

    Raises:
        ValueError: naming a parameter that trains and another parameter or buffer that has elements of it.
    """
    held = {name: tensor for name, tensor in (*model.named_parameters(), *model.named_buffers()) if _has_memory(tensor)}
    by_storage: dict[int, list[str]] = defaultdict(list)
    for name, tensor in held.items():
        by_storage[tensor.untyped_storage().data_ptr()].append(name)
    for names in by_storage.values():
        _refuse_overlap([(name, held[name]) for name in names])
    for tensor in held.values():
        if isinstance(tensor, nn.Parameter) and not tensor.is_contiguous():
            tensor.data = tensor.data.contiguous()


def _has_memory(tensor: Tensor) -> bool:
    if type(tensor) not in (Tensor, nn.Parameter):  # DTensors, quantized weights: what they hold is of others
        return False
    plain = tensor.layout is torch.strided and not tensor.is_meta
    return plain and tensor.numel() > 0 and tensor.untyped_storage().data_ptr() != 0


def _refuse_overlap(views: Sequence[tuple[str, Tensor]]) -> None:
    """Refuse two of ``views`` of a storage of which one trains and has bytes of the other.

    A file that is mapped into memory is one storage of all parameters, so only neighbors are compared.
    """
    unfinished: list[tuple[int, str, Tensor]] = []  # those that end behind where the next one begins
    for begin, end, name, view in sorted(((*_extent(view), name, view) for name, view in views), key=lambda x: x[0]):
        unfinished = [(last, other, before) for last, other, before in unfinished if last > begin]
        for _, other, before in unfinished:
            trains = before.requires_grad or view.requires_grad
            if trains and _have_common_bytes(before, view):
                raise ValueError(_message(other, name, before, view))
        unfinished.append((end, name, view))


def _extent(view: Tensor) -> tuple[int, int]:
    """Return the first byte of ``view`` in its storage, and the one behind its last."""
    elements = sum(int(size - 1) * int(stride) for size, stride in zip(view.shape, view.stride(), strict=True)) + 1
    begin, size = int(view.storage_offset()), view.element_size()
    return begin * size, (begin + elements) * size


def _have_common_bytes(one: Tensor, other: Tensor) -> bool:
    (begin, end), (other_begin, other_end) = _extent(one), _extent(other)
    around = min(begin, other_begin), max(end, other_end)
    return bool((_bytes(one, *around) & _bytes(other, *around)).any())


def _bytes(view: Tensor, begin: int, end: int) -> Tensor:
    """Mark what belongs to ``view`` from the byte ``begin`` of its storage to the byte ``end``."""
    size, marked = view.element_size(), torch.zeros(end - begin, dtype=torch.bool)
    strides = [stride * size for stride in view.stride()]
    marked.as_strided((*view.shape, size), (*strides, 1), view.storage_offset() * size - begin).fill_(True)
    return marked


def _message(one: str, other: str, first: Tensor, second: Tensor) -> str:
    what = "are two parameters" if isinstance(second, nn.Parameter) else "are a parameter and a buffer"
    return (
        f"{one} {list(first.shape)} and {other} {list(second.shape)} {what} of one memory: on one process each step of "
        "the optimizer on one of them changes the other, and shards of them would go apart. Give both places the same "
        "nn.Parameter (b.weight = a.weight, which is tied), or a copy (nn.Parameter(a.weight.detach().clone())); with "
        "LoRA of peft on a tied embedding leave ensure_weight_tying out; or use DDPStrategy"
    )
