"""Which modules Megatron-FSDP gathers and frees as one, and what it sees of their outputs.

It takes classes, and two layers of one class may be a block, which all ranks call, and an expert, which some do. So it
gets one that knows its members by themselves.
"""

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_automodel._compat.pytree import tree_map_only
from lightning_automodel.config.imports import import_classes_from_paths
from lightning_automodel.modules.structure import find_independent_blocks, find_towers, outermost
from lightning_automodel.parallel.hidden_outputs import differentiable


class _OfMembers(type):
    """A class whose instances are chosen modules."""

    members: frozenset[int]

    def __instancecheck__(cls, module: Any) -> bool:
        return id(module) in cls.members


def unit_classes(module: nn.Module, paths: Sequence[str] | None) -> list[type[nn.Module]]:
    """Find the classes that the library gathers as one: those named, else one of the blocks that all ranks call alike,
    and of the children of ``module`` that have none.

    Those of towers (vision, audio) are none of them: a batch without images passes over all of one.

    Raises:
        ValueError: for a path that names nothing.
    """
    if paths is not None:
        return import_classes_from_paths(paths)
    found: list[nn.Module] = []
    for child in module.children():
        blocks, towers = find_independent_blocks(child), list(find_towers(child))
        outside = [block for name, block in blocks.items() if outermost(towers, name) is None]
        found += outside or blocks.values() or [child]
    members = {"members": frozenset(map(id, found))}
    return [cast(type[nn.Module], _OfMembers("Unit", (nn.Module,), members))]


def units_in(module: nn.Module, classes: Iterable[type[nn.Module]]) -> list[nn.Module]:
    """Find the outermost units."""
    if isinstance(module, tuple(classes)):
        return [module]
    return [unit for child in module.children() for unit in units_in(child, classes)]


# ---- outputs ---------------------------------------------------------------------------------------------------------


class _Shown(tuple):
    """The tensors of an output from which the library is to see a backward pass come, and the output."""

    output: Any


def show_outputs(units: Iterable[nn.Module]) -> None:
    """Show the library the tensors of what units return from now on, if it would not find them: in dicts and objects.

    It gathers a unit for its backward pass where a gradient reaches a tensor, or a member of a tuple or a list. Called
    before the library puts its hooks on the units, and :func:`take_outputs` afterwards.
    """
    for unit in units:
        unit.register_forward_hook(_show)


def take_outputs(units: Iterable[nn.Module]) -> None:
    """Give hooks that stand behind those of the library the outputs themselves."""
    for unit in units:
        unit.register_forward_hook(_take)


def viewed(output: Any) -> Any:
    """View tensors once more: a gradient meets hooks on them before those on what they are views of.

    Not those of other classes: logits that a loss computes later know no views.
    """
    return tree_map_only(Tensor, lambda tensor: tensor.view_as(tensor) if type(tensor) is Tensor else tensor, output)


@torch.compiler.disable
def _show(unit: nn.Module, args: tuple, output: Any) -> Any:
    found = differentiable(output)
    seen = [output] if isinstance(output, Tensor) else output if isinstance(output, tuple | list) else []
    if all(any(tensor is each for each in seen) for tensor in found):
        return output
    output = viewed(output)
    shown = _Shown(differentiable(output))
    shown.output = output
    return shown


@torch.compiler.disable
def _take(unit: nn.Module, args: tuple, output: Any) -> Any:
    return output.output if isinstance(output, _Shown) else output
