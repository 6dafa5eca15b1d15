"""Derives which boundary children are to be proved sums over the ranks, and which of their members give the terms."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn

from lightning_automodel._compat.torch.modules import own_parameters
from lightning_automodel.modules.structure import CONTAINERS, outermost
from lightning_automodel.modules.wrappers import is_wrapper
from lightning_automodel.plans.known_code import is_known, works_across_features
from lightning_automodel.plans.linearity import Kind
from lightning_automodel.plans.styles import Enter, Leave, Style


@dataclass(frozen=True)
class Term:
    """A member of a boundary child that gives a rank's term of the sum.

    Attributes:
        known: its class is; otherwise what it computes is watched as well.
        parameters: its own that make terms, and what they are.
    """

    known: bool
    parameters: Mapping[str, Kind]


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
        measured: the plan was compared with one process for this class; code of other packages is not part of that.
    """
    found = {}
    for boundary in boundaries:
        below = {n: m for n, m in modules.items() if n == boundary or n.startswith(f"{boundary}.")}
        if measured and not _is_of_user(below, module_styles):
            continue
        terms = {n: _term(n, m, module_styles.get(n), parameter_styles) for n, m in below.items()}
        itself = terms[boundary]
        if itself is None or not itself.known:
            found[boundary] = {name: term for name, term in terms.items() if term is not None}
    return found


def find_holders(
    modules: Mapping[str, nn.Module],
    module_styles: Mapping[str, Style],
    boundaries: list[str],
    measured: bool,
    blocks: Iterable[str],
) -> list[str]:
    """Find the modules outside of boundary children that compute with features of which a rank has a part.

    They hold what gives such features, or are a user's and hold layers of all features with a part of the matrix; or
    they are blocks whose own code is a user's, and may do anything with what they hold.

    Args:
        modules: all modules of the model by name.
        module_styles: of those that the plan names.
        boundaries: names of the boundary children.
        measured: the plan was compared with one process for this class; modules without code of others are left out.
        blocks: names of the repeated blocks.
    """
    own = [block for block in blocks if not is_known(modules[block])]
    found = {block: None for block in own if any(name.startswith(f"{block}.") for name in module_styles)}
    for name, style in module_styles.items():
        gives_part = style.opens and style.leave is Leave.NONE
        if (gives_part or style.joins) and outermost([*boundaries, *own], name) is None:
            holder = name.rpartition(".")[0]
            while isinstance(modules[holder], CONTAINERS) or is_wrapper(modules[holder]):
                holder = holder.rpartition(".")[0]
            below = {n: m for n, m in modules.items() if n == holder or n.startswith(f"{holder}.")}
            if gives_part and holder and (not measured or _is_of_user(below, module_styles)):
                found[holder] = None
            if style.joins and outermost(list(blocks), holder) and not all(map(is_known, below.values())):
                found[holder] = None
    return list(found)


def _is_of_user(modules: Mapping[str, nn.Module], module_styles: Mapping[str, Style]) -> bool:
    """Tell whether any of ``modules`` may be another than that with which a plan was compared with one process."""
    across = any(works_across_features(m) for n, m in modules.items() if n not in module_styles)
    return across or not all(map(is_known, modules.values()))


def _term(name: str, module: nn.Module, style: Style | None, parameter_styles: Mapping[str, Style]) -> Term | None:
    styles = {p: parameter_styles[f"{name}.{p}"] for p in own_parameters(module) if f"{name}.{p}" in parameter_styles}
    own = {p: Kind.PARTIAL if p.endswith("bias") else Kind.ROW for p, s in styles.items() if s.closes}
    gives = style is not None and (style.leave is Leave.REDUCE or style.enter is Enter.DIVIDE)
    return Term(gives and is_known(module), own) if own or gives else None
