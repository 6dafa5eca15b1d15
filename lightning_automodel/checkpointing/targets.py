"""Allocates what the states of an optimizer are read into: sharded as parameters are, or whole on each rank."""

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from lightning_automodel._compat.dtensor.tensors import dtensor_from
from lightning_automodel._compat.torch.pytree import tree_map_only
from lightning_automodel.checkpointing.files.dcp import StoredTensor
from lightning_automodel.distributed.uneven_shards import as_stored, like_parameter

Pairs = list[tuple[Tensor, StoredTensor | Tensor]]
"""tensors, with what is to be read into them"""


def targets_of_none(saved: Mapping[str, Any], pairs: Pairs) -> dict[str, Any]:
    """Allocate what an optimizer keeps for all parameters together, whole on each rank, and note what is read."""
    names = {name for group in saved["param_groups"] for name in group["params"]}
    return {key: allocate(torch.empty(0), value, pairs) for key, value in saved["state"].items() if key not in names}


def targets_of(parameter: Tensor, saved: Any, pairs: Pairs) -> Any:
    """Allocate the states of one parameter; a count of its steps is no part of it, as torch has it for that name."""
    if "step" not in saved or as_stored(parameter).ndim:
        return allocate(parameter, saved, pairs)
    owners = {key: torch.empty(0) if key == "step" else parameter for key in saved}
    return {key: allocate(owners[key], value, pairs) for key, value in saved.items()}


def allocate(parameter: Tensor, saved: Any, pairs: Pairs) -> Any:
    """Allocate the states of one parameter, and note for each tensor what is to be read into it."""

    def target(value: StoredTensor | Tensor) -> Tensor:
        found = _empty_for(parameter, value)
        pairs.append((like_parameter(parameter, found), value))
        return found

    return tree_map_only((StoredTensor, Tensor), target, saved)


def _empty_for(parameter: Tensor, value: StoredTensor | Tensor) -> Tensor:
    """Allocates a state: sharded as its parameter if it has the same shape, else whole on each rank."""
    if tuple(value.shape) == tuple(as_stored(parameter).shape):
        return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
    whole = torch.empty(value.shape, dtype=value.dtype, device=parameter.device if value.shape else "cpu")
    if not isinstance(parameter, DTensor) or not value.shape:
        return whole
    mesh = parameter.device_mesh
    return dtensor_from(whole, mesh, (Replicate(),) * mesh.ndim, whole.shape, whole.stride())


def with_their_dtypes(loaded: Any, read: Any, dtype: torch.dtype) -> Any:
    """Put states back that ``load_state_dict`` has cast to the ``dtype`` of their parameter: ``read`` in another one.

    torch takes states for numbers of that dtype, and optimizers keep sums in float64, weights in float32 beside those
    in bfloat16, and counts.
    """
    if isinstance(read, Tensor) and isinstance(loaded, Tensor):
        was_cast = loaded.dtype == dtype != read.dtype and loaded.shape == read.shape
        return read.to(loaded.device) if was_cast else loaded
    if isinstance(read, Mapping) and isinstance(loaded, MutableMapping):
        for key in read.keys() & loaded.keys():
            loaded[key] = with_their_dtypes(loaded[key], read[key], dtype)
    elif isinstance(read, list | tuple) and type(loaded) is type(read) and len(loaded) == len(read):
        return type(loaded)(with_their_dtypes(*pair, dtype) for pair in zip(loaded, read, strict=True))
    return loaded
