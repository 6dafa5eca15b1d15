"""What a trial puts in the place of a module's weights: drawn ones, whole and as a rank's slices (``trials.py``)."""

from collections.abc import Generator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_tensor

from lightning_automodel._compat.torch.modules import own_parameters
from lightning_automodel.modules.wrappers import find_adapted_parameters
from lightning_automodel.parallel.tensor.local_tensors import rows_of_rank, take_rows
from lightning_automodel.plans import Layout, ParameterLayout
from lightning_automodel.plans.styles import Enter

_HELD = {Enter.EMBED, Enter.NORM, Enter.ROW_NORM}
"""Collectives that are part of what a module computes."""
Attributes = dict[str, dict[str, Any]]
_whole: list[bool] = []


@dataclass(frozen=True, kw_only=True)
class Tried:
    """What a module was before it was split.

    Attributes:
        name: of the module.
        is_boundary: what it gives is a term of a sum; else its members have summed.
        parameters: by module inside of it and name: which one of its tensors it is (ties), its shape and its layout.
        attributes: by module inside of it, those that a rank has other values for.
    """

    name: str
    is_boundary: bool
    parameters: Mapping[tuple[str, str], tuple[int, torch.Size, ParameterLayout]]
    attributes: Attributes


def modules_to_try(model: nn.Module, layout: Layout, gathered_alone: Set[str]) -> list[Tried]:
    """Describe the modules of ``model``, which is still whole, that have to prove that they are right on slices.

    Modules with parameters that are no plain numbers, or that others put in place while they run, are not tried; nor
    are blocks, where the sequence is cut between their children.
    """
    names = [
        *layout.terms,
        *(n for n in layout.holders if layout.sequence is None or n not in layout.sequence.children),
    ]
    return [_describe(model, name, layout) for name in names if _can_try(model, name, layout, gathered_alone)]


def _can_try(model: nn.Module, name: str, layout: Layout, gathered_alone: Set[str]) -> bool:
    module = model.get_submodule(name)
    if any(find_adapted_parameters(module)) or not all(p.is_floating_point() for p in module.parameters()):
        return False
    inside = [n for n, _ in module.named_modules(prefix=name)]
    enters = [layout.modules[n].enter for n in inside if n in layout.modules]
    known = all(f"{name}.{p}" in layout.parameters for p, _ in module.named_parameters(remove_duplicate=False))
    return known and gathered_alone.isdisjoint(inside) and _HELD.isdisjoint(enters)


def _describe(model: nn.Module, name: str, layout: Layout) -> Tried:
    inside = {
        n.removeprefix(name).removeprefix("."): (n, m) for n, m in model.get_submodule(name).named_modules(prefix=name)
    }
    numbers: dict[int, int] = {}
    parameters = {
        (n, p): (numbers.setdefault(id(value), len(numbers)), value.shape, layout.parameters[f"{full}.{p}"])
        for n, (full, module) in inside.items()
        for p, value in own_parameters(module).items()
        if value is not None
    }
    attributes = {
        n: {a: vars(module).get(a) for a in layout.attributes[full]}
        for n, (full, module) in inside.items()
        if full in layout.attributes
    }
    return Tried(name=name, is_boundary=name in layout.terms, parameters=parameters, attributes=attributes)


def is_whole_now() -> bool:
    """Tell whether a module runs with whole weights, so that collectives have nothing to do."""
    return bool(_whole)


def draw_weights(tried: Tried, device: torch.device) -> dict[tuple[str, str], Tensor]:
    """Draw a value for each parameter: matrices keep the size of what they multiply, vectors are positive.

    The parts of a matrix have unlike means, and none is zero.
    """
    generator = torch.Generator(device).manual_seed(0)
    drawn: dict[int, Tensor] = {}
    for number, shape, _ in tried.parameters.values():
        if number not in drawn:
            if len(shape) > 1:
                matrix = torch.randn(shape, generator=generator, device=device)
                rows, columns = (torch.linspace(0, 0.4, size, device=device) for size in shape[-2:])
                drawn[number] = (matrix + rows[:, None] + columns) / max(shape[-1], 1) ** 0.5
            else:
                drawn[number] = torch.rand(shape, generator=generator, device=device) + 0.5
    return {key: drawn[number] for key, (number, _, _) in tried.parameters.items()}


def slice_of_rank(whole: Tensor, layout: ParameterLayout, tp_mesh: DeviceMesh) -> Tensor:
    """Return what this rank has of ``whole``, as ``layout`` says; of what one rank adds, others have zeros."""
    local = distribute_tensor(whole, tp_mesh, [layout.placement], src_data_rank=None).to_local()
    if rows := rows_of_rank(layout, next(iter(whole.shape), 0), tp_mesh):
        return take_rows(local, rows)
    return local * 0 if layout.on_first_rank and tp_mesh.get_local_rank() else local


@contextmanager
def in_place(module: nn.Module, values: Mapping[tuple[str, str], Tensor]) -> Generator[None, None, None]:
    """Put ``values`` in the place of the parameters within this context."""
    tables = {key: own_parameters(module.get_submodule(key[0])) for key in values}
    before = {key: tables[key][key[1]] for key in values}
    try:
        for key, value in values.items():
            tables[key][key[1]] = nn.Parameter(value, requires_grad=False)
        yield
    finally:
        for key, parameter in before.items():
            tables[key][key[1]] = parameter


@contextmanager
def without_collectives() -> Generator[None, None, None]:
    """Let collectives of split modules do nothing within this context."""
    _whole.append(True)
    try:
        yield
    finally:
        _whole.pop()


@contextmanager
def restored(module: nn.Module, attributes: Attributes) -> Generator[None, None, None]:
    """Give modules the attributes that they had before they were split, within this context."""
    now = {name: {a: vars(module.get_submodule(name)).get(a) for a in values} for name, values in attributes.items()}
    try:
        _assign(module, attributes)
        yield
    finally:
        _assign(module, now)


def _assign(module: nn.Module, attributes: Attributes) -> None:
    for name, values in attributes.items():
        table = vars(module.get_submodule(name))
        table.update(values)
        for attribute in [a for a, value in values.items() if value is None]:
            del table[attribute]
