"""Types the values of a tensor-parallel forward pass, and so derives gradient placements and collectives from it alone.

A value is *whole* (equal on all ranks of tp, and so is its gradient), *copied* (equal, but each rank's gradient is a
term of a sum: it went through a copy-in) or *varying* (slices or terms). The rule is that of `plans.layout`, applied to
what runs instead of to the structure:

    operands                     result     what that means for the others
    ---------------------------  ---------  ---------------------------------------------------------------------------
    one is varying               varying    a whole parameter has a partial gradient; a whole activation lacks a copy-in
    else one is copied           copied     the same
    else                         whole      a parameter has a whole gradient

Only collectives lead back. A value made of parameters alone keeps their names until it meets an activation.
"""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lightning_automodel.distributed import collectives
from lightning_automodel.modules.parameter_swap import ParameterSwap
from lightning_automodel.parallel.tensor import apply as tensor_parallel
from lightning_automodel.plans import Layout
from lightning_automodel.plans.selection import wildcard
from lightning_automodel.plans.styles import Enter

_TYPE = "_type_of_oracle"


class Kind(Enum):
    """What the ranks of tp hold of a value."""

    WHOLE = "whole"
    COPIED = "copied"
    VARYING = "varying"


@dataclass(frozen=True)
class Type:
    """The type of one value.

    Attributes:
        kind: see :class:`Kind`.
        parameters: the whole parameters that it is made of, and of nothing else that is differentiable.
        copies: numbers of the copy-ins that it comes from.
        problems: what went wrong on its way; it counts if the value reaches the loss.
    """

    kind: Kind = Kind.WHOLE
    parameters: frozenset[str] = frozenset()
    copies: frozenset[int] = frozenset()
    problems: frozenset[str] = frozenset()


@dataclass
class Findings:
    """What a forward pass shows.

    Attributes:
        partial: whole parameters that meet varying or copied values.
        whole: whole parameters that meet whole ones.
        problems: collectives that lack, or are too many, and where.
    """

    partial: set[str] = field(default_factory=set)
    whole: set[str] = field(default_factory=set)
    problems: set[str] = field(default_factory=set)

    def mismatches(self, layout: Layout) -> dict[str, str]:
        """Whole parameters whose gradient the layout places differently, and how. Unused ones have no gradient."""
        found = {}
        for name in sorted(self.partial | self.whole):
            derived = "partial" if layout.parameters[name].gradient.is_partial() else "whole"
            seen = [kind for kind, names in (("partial", self.partial), ("whole", self.whole)) if name in names]
            if seen != [derived]:
                found[name] = f"{derived} in the layout, {' and '.join(seen)} in the forward pass"
        return found


def examine(model: nn.Module, tp_mesh: DeviceMesh, layout: Layout, batch: dict[str, Tensor]) -> Findings:
    """Splits ``model`` by ``layout``, in place, and runs it once. Collective over ``tp_mesh``."""
    oracle = Oracle(model)
    with oracle.watching():
        tensor_parallel.apply_tensor_parallel(model, tp_mesh, layout)
        tensor_parallel.install_copies(model, tp_mesh.get_group(), layout)
        with oracle:
            loss = model(**batch).loss
        oracle.finish(loss)
    return oracle.findings


class Oracle(TorchFunctionMode):
    """Types values while it is active; :meth:`watching` shows it the collectives and the local tensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.findings = Findings()
        self._names = {id(module): name for name, module in model.named_modules()}
        self._path: list[str] = []
        self._copies: dict[int, str] = {}
        self._used: set[int] = set()
        self._paused = False

    def finish(self, loss: Tensor) -> None:
        """The loss must be whole, and every copy-in must have met varying values."""
        found = _type(loss)
        self.findings.problems |= found.problems
        if found.kind is not Kind.WHOLE:
            self.findings.problems.add(f"the loss is {found.kind.value}")
        for number in self._copies.keys() - self._used:
            self.findings.problems.add(f"superfluous copy-in at {self._copies[number]}")

    @contextmanager
    def watching(self) -> Generator[None, None, None]:
        """Patches the places where types change that no operation shows."""
        apply = torch.autograd.Function.__dict__["apply"]  # a classmethod, of Python or (torch 2.15) of C

        def typed_apply(cls: type, *args: Any, **kwargs: Any) -> Any:
            return self._apply(cls, lambda: apply.__get__(None, cls)(*args, **kwargs), args)

        hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            with (
                mock.patch.object(torch.autograd.Function, "apply", classmethod(typed_apply)),
                mock.patch.object(ParameterSwap, "add", self._typed_add(ParameterSwap.add)),
                mock.patch.object(tensor_parallel, "_enter_function", _typed_share(tensor_parallel._enter_function)),
            ):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    # ---- operations --------------------------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Callable, types: Iterable[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self._paused:
            name = getattr(func, "__name__", "")
            results = list(_tensors(out))
            if _mutates(name) and isinstance(args[0], Tensor):
                results += [args[0]] if args[0]._base is None else [args[0], args[0]._base]
            self._combine(name, list(_tensors((args, kwargs))), results)
        return out

    def _combine(self, name: str, operands: list[Tensor], results: list[Tensor]) -> None:
        if not results or any(isinstance(x, DTensor) for x in (*operands, *results)):
            return
        joined = self._join(name, operands)
        for result in results:
            if not isinstance(result, nn.Parameter):
                setattr(result, _TYPE, joined)

    def _join(self, name: str, operands: list[Tensor]) -> Type:
        """The rule. Operands without a gradient decide only by varying."""
        every = [_type(x) for x in operands]
        active = [_type(x) for x in operands if x.requires_grad]
        problems = frozenset().union(*(x.problems for x in every))
        if any(x.kind is Kind.VARYING for x in every):
            self._used.update(*(x.copies for x in active))
            return Type(Kind.VARYING, problems=problems | self._meet_split(active, name))
        if any(x.kind is Kind.COPIED for x in active):
            copies = frozenset().union(*(x.copies for x in active))
            return Type(Kind.COPIED, copies=copies, problems=problems | self._meet_split(active, name))
        names = frozenset().union(*(x.parameters for x in active))
        if all(x.parameters for x in active):
            return Type(parameters=names, problems=problems)
        self.findings.whole |= names
        return Type(problems=problems)

    def _meet_split(self, operands: list[Type], name: str) -> frozenset[str]:
        """What whole operands mean where another one is not; the problems that are new."""
        self.findings.partial.update(*(x.parameters for x in operands))
        lacking = any(x.kind is Kind.WHOLE and not x.parameters for x in operands)
        return frozenset([f"missing copy-in before {name} at {self._place()}"] if lacking else [])

    # ---- collectives -------------------------------------------------------------------------------------------------

    def _apply(self, cls: type, call: Callable[[], Any], args: tuple) -> Any:
        paused, self._paused = self._paused, True
        try:
            out = call()
        finally:
            self._paused = paused
        if cls.__module__ == collectives.__name__:
            setattr(out, _TYPE, self._collective(cls.__name__.removeprefix("_"), args[0]))
        else:
            self._combine(cls.__name__, list(_tensors(args)), list(_tensors(out)))
        return out

    def _collective(self, name: str, value: Tensor) -> Type:
        """The type after a collective."""
        before = _type(value)
        takes, gives = _COLLECTIVES[name]
        problems = before.problems
        if before.kind is not takes:
            problems |= {f"{name} of a {before.kind.value} value at {self._place()}"}
        if takes is not Kind.VARYING:
            self.findings.whole |= before.parameters
        self._used |= before.copies
        if gives is not Kind.COPIED:
            return Type(gives, problems=problems)
        number = len(self._copies)
        self._copies[number] = self._place()
        return Type(Kind.COPIED, copies=frozenset([number]), problems=problems)

    # ---- local tensors -----------------------------------------------------------------------------------------------

    def _typed_add(self, add: Callable) -> Callable:
        def typed_add(swap: ParameterSwap, owner: nn.Module, name: str, entry: Any) -> None:
            prefix = self._names[id(owner)]
            add(swap, owner, name, self._typed_local(f"{prefix}.{name}" if prefix else name, entry))

        return typed_add

    def _typed_local(self, name: str, entry: Any) -> Callable:
        def typed(parameter: DTensor) -> Tensor:
            paused, self._paused = self._paused, True
            local = entry(parameter)
            self._paused = paused
            whole = parameter.placements[0].is_replicate()
            if whole and (entry.rows or entry.zero):  # each rank takes another part of it
                self.findings.partial.add(name)
                whole = False
            setattr(local, _TYPE, Type(parameters=frozenset([name])) if whole else Type(Kind.VARYING))
            return local

        return typed

    def _enter(self, module: nn.Module, _: Any) -> None:
        self._path.append(self._names.get(id(module), ""))

    def _leave(self, *_: Any) -> None:
        self._path.pop()

    def _place(self) -> str:
        return wildcard(self._path[-1]) if self._path and self._path[-1] else "the model"


_COLLECTIVES = {
    "CopyIn": (Kind.WHOLE, Kind.COPIED),
    "ReduceOut": (Kind.VARYING, Kind.WHOLE),
    "Gather": (Kind.VARYING, Kind.WHOLE),
    "Split": (Kind.WHOLE, Kind.VARYING),
    "GatherIn": (Kind.VARYING, Kind.COPIED),
    "ScatterOut": (Kind.VARYING, Kind.VARYING),
    "ScaleGradient": (Kind.COPIED, Kind.WHOLE),
}


def _typed_share(enter_function: Callable) -> Callable:
    """A rank's share of a value is a term of a sum, which division does not show."""

    def typed(enter: Enter, *args: Any) -> Any:
        function = enter_function(enter, *args)
        if enter is not Enter.DIVIDE:
            return function

        def share(value: Tensor) -> Tensor:
            out = function(value)
            setattr(out, _TYPE, replace(_type(out), kind=Kind.VARYING))
            return out

        return share

    return typed


def _type(value: Tensor) -> Type:
    return getattr(value, _TYPE, Type())


def _tensors(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def _mutates(name: str) -> bool:
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))
    return name.endswith("_")
