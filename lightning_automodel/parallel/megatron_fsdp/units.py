"""Which modules Megatron-FSDP gathers and frees as one, and what it sees of their outputs.

It takes classes, and two layers of one class may be a block, which all ranks call, and an expert, which some do. So it
gets one that knows its members by themselves.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from lightning_automodel._compat.torch.pytree import tree_leaves
from lightning_automodel._compat.torch.tensors import base_of
from lightning_automodel.config.imports import import_classes_from_paths
from lightning_automodel.modules.caches import new_in_caches
from lightning_automodel.modules.forward import named_arguments
from lightning_automodel.modules.structure import find_independent_blocks, find_towers, outermost
from lightning_automodel.parallel.given_containers import keep_given_containers
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
    """Show the library the tensors of what units return from now on, if it would not find them (in dicts and objects),
    or would return views of several, with which those that were computed from each other have no more to do.

    It gathers a unit for its backward pass where a gradient reaches a tensor, or a member of a tuple or a list. Called
    before the library puts its hooks on the units, and :func:`take_outputs` afterwards.
    """
    for unit in units:
        unit.register_forward_hook(_show)


def take_outputs(units: Iterable[nn.Module]) -> None:
    """Give hooks that stand behind those of the library the outputs themselves."""
    for unit in units:
        unit.register_forward_hook(_take)


def watch_changed_outputs(units: Iterable[nn.Module], gather: Callable[[nn.Module], None]) -> None:
    """Call ``gather`` with a unit to whose backward pass autograd comes without the library's hook: it stands on a view
    of the output, and autograd makes another view where code writes into that (``x = block(x); x += 1``); or a later
    pass has read keys and values that the unit left in a cache, or what it wrote into a list or a dict.

    Called behind the library's hooks, and behind :func:`take_outputs`.
    """
    for unit in units:
        unit.register_forward_hook(partial(_watch_bases, gather), with_kwargs=True)
        keep_given_containers(unit, partial(_watch_tensors, gather))


@torch.compiler.disable
def _watch_bases(
    gather: Callable[[nn.Module], None], unit: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any
) -> None:
    bases = {id(base): base for tensor in differentiable(output) if (base := base_of(tensor)) is not None}
    given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    entered = {id(each) for tensor in given for each in (tensor, base_of(tensor))}
    for base in bases.values():
        if not base.is_leaf and id(base) not in entered:
            base.register_hook(lambda _: gather(unit))
    if torch.is_grad_enabled() and (kept := new_in_caches(named_arguments(unit, args, kwargs))):
        register_multi_grad_hook(kept, lambda _: gather(unit), mode="any")  # it is not freed before all have come


def _watch_tensors(gather: Callable[[nn.Module], None], unit: nn.Module, tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        tensor.register_hook(lambda _: gather(unit))


@torch.compiler.disable
def _show(unit: nn.Module, args: tuple, output: Any) -> Any:
    found = differentiable(output)
    seen = [output] if isinstance(output, Tensor) else output if isinstance(output, tuple | list) else []
    if len(found) <= 1 and all(any(tensor is each for each in seen) for tensor in found):
        return output
    shown = _Shown(tensor for tensor in found if not any(tensor is given for given in args))
    shown.output = output
    return shown


@torch.compiler.disable
def _take(unit: nn.Module, args: tuple, output: Any) -> Any:
    return output.output if isinstance(output, _Shown) else output
