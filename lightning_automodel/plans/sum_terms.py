"""Derives which boundary children are to be proved sums over the ranks, and which of their members give the terms."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from torch import nn

from lightning_automodel._compat.modules import own_parameters
from lightning_automodel.modules.forward import code_of
from lightning_automodel.plans.linearity import Kind
from lightning_automodel.plans.styles import Enter, Leave, Style

MEASURED = ("transformers", "diffusers")
"""Packages whose models are compared with one process, family by family (docs/families.md)."""
KNOWN = (*MEASURED, "torch", "torchao", "peft")
"""Packages whose modules do what their style says."""


@dataclass(frozen=True)
class Term:
    """A member of a boundary child that gives a rank's term of the sum.

    Attributes:
        known: its class is, and its code is that of the class; otherwise what it computes is watched as well.
        parameters: its own that make terms, and what they are.
    """

    known: bool
    parameters: Mapping[str, Kind]


def package(module: nn.Module) -> str:
    """Returns the package that defines a module's class."""
    return type(module).__module__.partition(".")[0]


def _is_known(module: nn.Module) -> bool:
    """Tell whether a module does what its style says; code that was assigned to its ``forward`` may do anything."""
    code = code_of(module)
    while isinstance(code, partial):
        code = code.func
    own = (getattr(code, "__module__", None) or "").partition(".")[0]
    return package(module) in KNOWN and own in (*KNOWN, "lightning_automodel")


def derive_terms(
    modules: Mapping[str, nn.Module],
    module_styles: Mapping[str, Style],
    parameter_styles: Mapping[str, Style],
    boundaries: list[str],
    measured: bool,
) -> dict[str, dict[str, Term]]:
    """Derives the terms of each boundary child that is not known to be a sum.

    Args:
        modules: all modules of the model by name.
        module_styles: of those that the plan names.
        parameter_styles: of the parameters that it names, alone or with their module.
        boundaries: names of the boundary children.
        measured: the plan was compared with one process for this class; modules of other packages are not part of that.
    """
    found = {}
    for boundary in boundaries:
        below = {n: m for n, m in modules.items() if n == boundary or n.startswith(f"{boundary}.")}
        if measured and all(map(_is_known, below.values())):
            continue
        terms = {n: _term(n, m, module_styles.get(n), parameter_styles) for n, m in below.items()}
        itself = terms[boundary]
        if itself is None or not itself.known:
            found[boundary] = {name: term for name, term in terms.items() if term is not None}
    return found


def _term(name: str, module: nn.Module, style: Style | None, parameter_styles: Mapping[str, Style]) -> Term | None:
    styles = {p: parameter_styles[f"{name}.{p}"] for p in own_parameters(module) if f"{name}.{p}" in parameter_styles}
    own = {p: Kind.PARTIAL if p == "bias" else Kind.ROW for p, s in styles.items() if s.closes}
    gives = style is not None and (style.leave is Leave.REDUCE or style.enter is Enter.DIVIDE)
    return Term(gives and _is_known(module), own) if own or gives else None
