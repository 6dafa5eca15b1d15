"""What leaves a split layer of a user's beside its sum, and what enters one beside the stream.

::

    attention 0 --> terms of a sum, reduced
       |  |
       |  +-------> a loss of a router's logits: whole on all ranks, and each passes on 1 / tp of its gradient
       +----------> attention 1: values of a rank's heads, whose gradients are a rank's own

Whole values that enter a split layer are copied in: their gradients are summed over tp. What was computed within
another split layer has gradients of a rank's own, and enters as it is. Whether a value that leaves is whole, the trial
tells (``trials.py``): slices are for other split layers alone, and a loss of them is an error.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_automodel._compat.torch.tensors import is_in_backward
from lightning_automodel.distributed.collectives import copy_in, scale_gradient
from lightning_automodel.modules.forward import SharedByCopies, wrap_forward
from lightning_automodel.parallel.given_containers import changed, copies_of, giving_back, tensors_within
from lightning_automodel.parallel.tensor.origins import (
    is_joined,
    mixing_behind,
    note_entered,
    refused_if_slice,
    was_computed_within,
)
from lightning_automodel.parallel.tensor.parts import Beside, mark_part
from lightning_automodel.parallel.tensor.stream import is_float
from lightning_automodel.parallel.tensor.trial_weights import is_whole_now
from lightning_automodel.parallel.traces import refused
from lightning_automodel.plans import Layout
from lightning_automodel.plans.selection import wildcard
from lightning_automodel.plans.styles import Leave

_FOUND = "_what_a_rank_has_beside_its_sum"


def beside(output: Any) -> list[Tensor]:
    """List the floating-point tensors that a module gives beside the first output."""
    return list(filter(is_float, tensors_within(output[1:]))) if isinstance(output, tuple | list) else []


def note_beside(module: nn.Module, found: list[Beside]) -> None:
    """Note what a rank has of each of the tensors beside the first output of ``module``."""
    module.__dict__[_FOUND] = found


def install_beside(model: nn.Module, group: ProcessGroup, layout: Layout) -> None:
    """Let gradients of what leaves split layers of users beside their sums be whole, or an error."""
    for name in layout.terms:
        if name not in layout.modules or layout.modules[name].leave is not Leave.REDUCE_ALL:
            module = model.get_submodule(name)
            leaving = _Leaving(group, _message(name, module, group.size()))
            # Before the hooks of users, whose losses may read what is whole.
            module.register_forward_hook(leaving, with_kwargs=True, prepend=True)
            wrap_forward(module, _Writing(_message_of_written(name, module, group.size())))
    for name in layout.holders:
        model.get_submodule(name).register_forward_hook(_mark_parts)
    if layout.is_tried:
        model.register_forward_hook(_refuse_slices)


def _mark_parts(module: nn.Module, args: tuple, output: Any) -> None:
    if not is_whole_now() and not torch.compiler.is_compiling():
        for value, found in zip(beside(output), module.__dict__.get(_FOUND, []), strict=False):
            if found.dim is not None:
                mark_part(value, found.dim)


def _refuse_slices(model: nn.Module, args: tuple, output: Any) -> Any:
    """Let gradients of what ``model`` gives be an error where it reads what split layers hand to each other, or what
    they compute: a forward hook.
    """
    if torch.compiler.is_compiling() or is_in_backward() or is_whole_now() or not torch.is_grad_enabled():
        return None
    return changed(output, lambda x, _: refused_if_slice(x))


class _Leaving(SharedByCopies):
    def __init__(self, group: ProcessGroup, message: str) -> None:
        self.group, self.message = group, message

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        if is_whole_now() or not beside(output):
            return None
        noted = module.__dict__.get(_FOUND, [])
        found = iter(noted if len(noted) == len(beside(output)) else [Beside(is_whole=False)] * len(beside(output)))
        held = set() if torch.compiler.is_compiling() else _held_by_containers([*args, *kwargs.values()])

        def leave(x: Tensor, place: str) -> Tensor:
            return self._leave(x, next(found), id(x) in held) if is_float(x) else x

        others = changed(tuple(output[1:]), leave)
        return same_container(output, (output[0], *others))

    def _leave(self, value: Tensor, found: Beside, is_held: bool) -> Tensor:
        if is_held:  # those that the module has written there are refused
            return value
        is_known = torch.compiler.is_compiling()  # the passes before have refused what is neither
        if not is_known and is_joined(value):
            return value
        if found.is_whole:
            return scale_gradient(value, 1 / self.group.size()) if value.requires_grad else value
        if is_known:
            return value
        left = refused(value, self.message) if value.requires_grad else value
        return left if found.dim is None else mark_part(left, found.dim)


class _Writing(SharedByCopies):
    """Lets gradients of what a split layer writes into lists, dicts and the like that it is given be an error."""

    def __init__(self, message: str) -> None:
        self.message = message

    def __call__(self, module: nn.Module, forward: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling() or is_in_backward() or is_whole_now():
            return forward(*args, **kwargs)
        given = [*args, *kwargs.values()]
        return giving_back(given, given, lambda: forward(*args, **kwargs), lambda x, _: refused(x, self.message))[0]


class EnteringBeside:
    """Copies in what enters one split layer, but for what was computed within another.

    Args:
        name: of the layer.
        group: over tp.
        message: of the error where a loss reads what comes of it in the layer, and does not leave it.
    """

    def __init__(self, name: str, group: ProcessGroup, message: str) -> None:
        self.name, self.group, self.message = name, group, message
        self._within: dict[str, bool] = {}

    def enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Change what enters: tensors, and those in tuples, lists, dicts, dataclasses and objects of users."""
        if is_whole_now():
            return args, kwargs
        first = tuple(self._enter(x, str(place)) for place, x in enumerate(args))
        return first, {name: self._enter(x, name) for name, x in kwargs.items()}

    def _enter(self, value: Any, place: str) -> Any:
        return changed(value, lambda x, at: self.copy(x, at) if is_float(x) else x, place)

    def copy(self, value: Tensor, place: str) -> Tensor:
        """Copy in a whole ``value``; with what enters at ``place`` compiled blocks do as the first passes."""
        if not value.requires_grad:
            return value
        if not torch.compiler.is_compiling() and not is_in_backward():
            found = was_computed_within(value)
            if found is not None:
                self._within[place] = found
            if found and (operation := mixing_behind(value)):
                raise ValueError(_message_of_mixed(self.name, operation, self.group.size()))
        return value if self._within.get(place, False) else note_entered(copy_in(value, self.group), self.message)


def same_container(value: tuple | list, changed: Iterable[Any]) -> Any:
    """Return a tuple or list of what is ``changed``; ``value`` itself, to which a module may append, if nothing is."""
    entries = list(changed)
    if all(x is y for x, y in zip(entries, value, strict=True)):
        return value
    if isinstance(value, list):
        return entries
    return type(value)(*entries) if hasattr(value, "_fields") else tuple(entries)


def _held_by_containers(given: list[Any]) -> set[int]:
    """Note the tensors in what a module can write into."""
    return {id(x) for container in copies_of(given, given) for x in tensors_within(container.given)}


def _message(name: str, module: nn.Module, tp: int) -> str:
    return (
        f"a loss reads what {name} ({type(module).__name__}) returns beside its first output, and what one of {tp} tp "
        "ranks has there is another value than one process has: of its own heads or features. Only other attention and "
        "feed-forward layers may read it (and blocks in torch.utils.checkpoint only with use_reentrant=False). Add "
        f"the rule {wildcard(name)!r}: 'separate' to "
        "FSDP2Config(tp_plan={'extends': 'model', ...}) and leave whole what gives that value ('replicate'); or return "
        "value.detach()"
    )


def _message_of_mixed(reader: str, operation: str, tp: int) -> str:
    return (
        f"what {reader} is given comes from another layer that is split, of whose heads or features one of {tp} tp "
        f"ranks has its own, and has gone through {operation} between the two, which may compute across them: other "
        "numbers than one process has. Leave whole the layers that give and read it, with a rule 'replicate' for each "
        "of their layers in FSDP2Config(tp_plan={'extends': 'model', ...}), or use tp=1"
    )


def _message_of_written(name: str, module: nn.Module, tp: int) -> str:
    return (
        f"a loss reads what {name} ({type(module).__name__}) writes into a list, a dict or an object that it is given: "
        f"every one of the {tp} tp ranks computes it, and their gradients would be summed. Return it beside the first "
        f"output; or add the rule {wildcard(name)!r}: 'separate' to FSDP2Config(tp_plan={{'extends': 'model', ...}}): "
        "each of its members then takes its own collectives; or write value.detach()"
    )
