"""Cuts this rank's part out of entries of weight files, for parameters that are DTensors already.

::

    an entry is the parameter, name aside   ->   its slices are read, by transformers' threads
    a conversion that only moves elements   ->   carried out on unread tensors; the slices of its result are read
    any other conversion                    ->   carried out as plain transformers does, on whole tensors; then sliced
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lightning_automodel._compat.dtensor.tensors import dtensor_like
from lightning_automodel._compat.transformers.conversions import (
    ConversionFailed,
    conversion_inputs,
    forget_conversion_error,
    quantizes,
)
from lightning_automodel.distributed.shards import boxes_of, local_tensor
from lightning_automodel.loading.quantized import set_four_bit
from lightning_automodel.loading.unread_tensors import UnreadTensor, unread


class ExactShardOperation:
    """Stands in the place of transformers' reader of a rank's slices, whose offsets hold for some layouts only.

    Args:
        parameter: where the entry goes, if no conversion sends it elsewhere.
    """

    def __init__(self, parameter: DTensor) -> None:
        self.parameter = parameter

    def shard_tensor(
        self,
        source: Any,
        tensor_idx: int | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Cuts this rank's part out of ``source``: a tensor, or an unread entry of a file.

        Args:
            source: a tensor, or an unread entry of a file.
            tensor_idx: a number if a conversion takes the entry, ``None`` if it is the parameter.
            device: where the result goes.
            dtype: of the result.
        """
        shape = source.shape if isinstance(source, Tensor) else source.get_shape()
        if tensor_idx is not None or tuple(shape) != tuple(self.parameter.shape):
            return unread(source, dtype, device)
        found = boxes_of(self.parameter)
        if len(found) == 1:
            local = _with_own_memory(found[0].of_whole(source).to(device=device, dtype=dtype))
        else:
            local = local_part(unread(source, dtype, device), self.parameter)
        return dtensor_like(local, self.parameter)


def _with_own_memory(part: Tensor) -> Tensor:
    """Copy ``part`` if it is a view of more.

    Pickled files and ``state_dict=`` give tensors, which each shard would keep whole; and ``copy.deepcopy`` of torch
    (2.13) fails for a DTensor that begins behind the start of its memory.
    """
    is_view = part.untyped_storage().nbytes() > part.nbytes
    return part.clone(memory_format=torch.contiguous_format) if is_view else part


def convert(original: Callable, conversion: Any, name: str, **context: Any) -> Any:
    """Carries out a conversion on unread tensors, and on whole ones where it does more than move elements."""
    inputs = conversion_inputs(conversion)
    unread_ones = any(isinstance(x, UnreadTensor) for tensors in inputs.values() for x in tensors)
    if unread_ones and not quantizes(conversion):
        try:
            conversion.collected_tensors = {key: list(tensors) for key, tensors in inputs.items()}
            return original(conversion, name, **context)
        except ConversionFailed:
            forget_conversion_error(context["loading_info"], name)
    whole = {key: [x.read() if isinstance(x, UnreadTensor) else x for x in xs] for key, xs in inputs.items()}
    conversion.collected_tensors = whole
    del inputs
    return original(conversion, name, **context)


def set_parameter(original: Callable, model: PreTrainedModel, name: str, value: Any, info: Any, *args: Any) -> None:
    """Gives a parameter its part of ``value``: a whole tensor, an unread one, or the part as a DTensor."""
    set_plain = partial(_set_plain, original, info=info, rest=args)
    if not set_four_bit(set_plain, model, name, value):
        set_plain(model, name, value)


def _set_plain(original: Callable, model: PreTrainedModel, name: str, value: Any, info: Any, rest: tuple) -> None:
    owner, _, attribute = name.rpartition(".")
    like = getattr(model.get_submodule(owner), attribute, None)
    if isinstance(value, Tensor) and isinstance(like, DTensor):
        if value.shape != like.shape:
            info.missing_keys.discard(name)
            info.mismatched_keys.add((name, value.shape, like.shape))
            return
        value = local_part(value, like)
    elif isinstance(value, UnreadTensor):
        value = value.read()
    original(model, name, value, info, *rest)


def local_part(value: Tensor, like: DTensor) -> Tensor:
    """Copy this rank's boxes out of ``value`` laid out as ``like``, into memory of its own."""
    if isinstance(value, DTensor):
        return local_tensor(value)
    of_file = isinstance(value, UnreadTensor)
    device = torch.device("cpu") if of_file else value.device
    local = torch.empty(local_tensor(like).shape, dtype=value.dtype, device=device)
    for box in boxes_of(like):
        if isinstance(value, UnreadTensor):
            ends = (start + size for start, size in zip(box.offsets, box.sizes, strict=True))
            value.fill(list(zip(box.offsets, ends, strict=True)), box.of_local(local))
        else:
            box.of_local(local).copy_(box.of_whole(value))
    return local.to(value.device)
