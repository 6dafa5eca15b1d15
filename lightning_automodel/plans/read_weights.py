"""Finds code of users that reads a split weight outside of its layer, in the forward pass of a model.

::

    def forward(self, ids):
        hidden = self.model(ids)
        return self.lm_head(hidden), self.lm_head.weight.square().sum()
               whole                 of this rank's rows: an error
"""

import dis
import inspect
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from types import CodeType
from typing import Any

from torch import nn

from lightning_automodel.modules.authors import links_of, place_of
from lightning_automodel.modules.forward import code_of
from lightning_automodel.modules.reachable_code import is_of_library_named, names_in
from lightning_automodel.modules.structure import outermost
from lightning_automodel.plans.known_code import KNOWN
from lightning_automodel.plans.selection import wildcard

_WEIGHTS = {"weight", "bias"}
_OF_ALL_PARTS = {"data_ptr", "device", "dim", "dtype", "is_floating_point", "ndim", "requires_grad"}
"""What a part of a weight tells as the whole does."""
_TAKES_ROWS = "chunked_linear_cross_entropy"
"""Our function of a rank's rows and their group."""
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_GIVING = {"get_output_embeddings", "get_input_embeddings"}


def check_read_weights(modules: Mapping[str, nn.Module], split: Iterable[str], inside: Iterable[str]) -> None:
    """Check that no model's own code reads a weight of which each rank has a part.

    Args:
        modules: all modules of the model by name.
        split: names of the layers whose parameters are split.
        inside: names of blocks and boundaries: what is read in them is tried, and of them from outside is an error.

    Raises:
        ValueError: naming the model, the layer and the ways out.
    """
    inside = list(inside)
    layers = [name for name in split if outermost(inside, name) is None]
    outside = [name for name in modules if outermost([*inside, *layers], name) is None]
    holders = [name for name in outside if place_of(code_of(modules[name])).partition(".")[0] not in KNOWN]
    for holder in holders if layers else []:
        below = [name for name in layers if name.startswith(f"{holder}.".lstrip("."))]
        read = _layers_read(modules[holder]) if below else set()
        for name in below:
            if name.rpartition(".")[2] in read or any(modules[name] is layer for layer in read):
                raise ValueError(_message(holder, modules[holder], name))


def _layers_read(module: nn.Module) -> set[str | nn.Module]:
    """List the layers whose weights the code of ``module`` reads, by the last name of those it has not itself."""
    found: set[str | nn.Module] = set()
    for code in _codes_behind(module):
        for path in [] if _TAKES_ROWS in names_in(code) else _owners_of_weights(code):
            name = path.rpartition(".")[2]
            try:
                owner = attrgetter(path)(module)
                owner = owner() if name in _GIVING else owner
            except AttributeError:  # of another object than the module
                owner = None
            found.add(owner if isinstance(owner, nn.Module) else name)
    return found


def _codes_behind(module: nn.Module) -> Iterator[CodeType]:
    """Walk through the code of a user's that the forward pass of ``module`` runs: functions and methods by name.

    Less than :func:`reachable_code` gives, for which all methods of a class run that calls ``super()``.
    """
    waiting: list[Any] = [code_of(module)]
    seen = set()
    while waiting:
        for link in links_of(waiting.pop()):
            if not inspect.isfunction(link) or link in seen or is_of_library_named(place_of(link)):
                continue
            seen.add(link)
            yield link.__code__
            names = names_in(link.__code__)
            of_class = [inspect.getattr_static(type(module), name, None) for name in names]
            of_bases = [vars(kind).get(link.__name__) for kind in type(module).__mro__ if link.__name__ in names]
            found = (*of_class, *of_bases, *(link.__globals__.get(name) for name in names))
            waiting += filter(inspect.isfunction, found)


def _owners_of_weights(code: CodeType) -> Iterator[str]:
    """Yield ``model.lm_head`` of ``self.model.lm_head.weight``, but for what is asked of its dtype or device."""
    path: list[str] = []
    steps = [i for i in dis.get_instructions(code) if i.opname not in ("CACHE", "PRECALL", "CALL", "PUSH_NULL")]
    for step, after in zip(steps, [*steps[1:], None], strict=True):
        is_attribute = step.opname in _ATTRIBUTES
        is_asked = after is not None and after.opname in _ATTRIBUTES and after.argval in _OF_ALL_PARTS
        if path and is_attribute and step.argval in _WEIGHTS and not is_asked:
            yield ".".join(path)
        path = [*path, str(step.argval)] if is_attribute else []
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _owners_of_weights(constant)


def _message(holder: str, module: nn.Module, layer: str) -> str:
    return (
        f"the forward pass of {holder or 'the model'} ({type(module).__name__}), which is code of a user's, reads the "
        f"weight of {layer}, of which each tp rank has its own part there. Call the layer; or leave it whole, with a "
        f"rule {wildcard(layer)!r}: 'replicate' (and for what is tied to it) in "
        "FSDP2Config(tp_plan={'extends': 'model', ...}); or read parameter.full_tensor() before the model is called"
    )
