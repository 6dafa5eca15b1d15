"""Gives parameters their placements before the model is made parallel, so that adapters may be added in between.

::

    from_pretrained:   built on meta -> place: as a copy that is made parallel has it -> slices are read
    configure_model:   adapters, heads, more tokens, frozen layers: an ordinary model whose parameters are DTensors
    build_parallel:    values aside -> the stages, once, over all there is -> values back
"""

import copy
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_automodel._compat.dtensor.tensors import dtensor_like, is_offloaded, mark_as_offloaded
from lightning_automodel._compat.torch.modules import own_parameters
from lightning_automodel.distributed.agreement import names_of_any_rank
from lightning_automodel.distributed.logs import rehearsal
from lightning_automodel.distributed.shards import copy_from_whole, local_tensor
from lightning_automodel.loading.whole_values import on_shards, was_written, whole_of
from lightning_automodel.modules.adapted_bases import forget_files
from lightning_automodel.modules.four_bit import describe, four_bit_layers
from lightning_automodel.modules.wrappers import without_wrappers


def place(model: nn.Module, parallelize: Callable[[nn.Module], object]) -> None:
    """Make the parameters of ``model`` the DTensors that they will be, and leave all else as it is.

    Args:
        model: on the meta device.
        parallelize: makes a copy of it parallel.
    """
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return  # transformers reads adapters into a model by the same function
    twin = copy.deepcopy(model)
    with rehearsal():
        parallelize(twin)
    for name, parameter in twin.named_parameters(remove_duplicate=False):
        if isinstance(parameter, DTensor):
            _set(model, name, parameter)
    for name, _, form in four_bit_layers(twin):
        describe(model.get_submodule(name), form)
    mark_as_offloaded(model, is_offloaded(twin))


@contextmanager
def values_aside(model: nn.Module) -> Generator[None, None, None]:
    """Put the values of placed parameters aside within this context, where they are plain and on the meta device.

    Args:
        model: is made parallel within this context.
    """
    values = {n: p for n, p in model.named_parameters(remove_duplicate=False) if isinstance(p, DTensor)}
    changed = [name for name, value in values.items() if was_written(value)]
    changed += _names_replaced(model) if values else []
    forget_files(model, names_of_any_rank(changed))  # a rank with an empty shard has written nothing
    on_meta = {parameter: _on_meta(parameter) for parameter in values.values()}
    for name, parameter in values.items():
        _set(model, name, on_meta[parameter])
    mark_as_offloaded(model, False)
    yield
    _put_back(model, values)


def _names_replaced(model: nn.Module) -> list[str]:
    """Name parameters below adapters in whose places the user's code has put others."""
    with without_wrappers(model):
        return [n for n, p in model.named_parameters(remove_duplicate=False) if not isinstance(p, DTensor)]


@on_shards
def _put_back(model: nn.Module, values: Mapping[str, nn.Parameter]) -> None:
    done: dict[Tensor, nn.Parameter] = {}
    for name, value in values.items():
        if value not in done:
            done[value] = _like(model.get_parameter(name), value)
        _set(model, name, done[value])


def _like(like: nn.Parameter, value: nn.Parameter) -> nn.Parameter:
    assert isinstance(value, DTensor)
    if not isinstance(like, DTensor):
        new: Tensor = whole_of(value).to(like.dtype)
    elif like.placements == value.placements and like.device_mesh == value.device_mesh:
        new = dtensor_like(local_tensor(value).to(like.dtype), like)
    else:
        new = dtensor_like(torch.empty_like(local_tensor(like), device=local_tensor(value).device), like)
        copy_from_whole(new, whole_of(value))
    parameter = nn.Parameter(new, requires_grad=like.requires_grad)
    parameter.__dict__.update(like.__dict__)
    return parameter


def _on_meta(parameter: nn.Parameter) -> nn.Parameter:
    whole = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    new = nn.Parameter(whole, requires_grad=parameter.requires_grad)
    new.__dict__.update(parameter.__dict__)
    return new


def _set(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, short = name.rpartition(".")
    own_parameters(model.get_submodule(owner))[short] = parameter
