"""Whether the styles of a plan fit the modules that they name: what would run, and give other numbers, is an error."""

from collections.abc import Iterator, Mapping

from torch import nn
from transformers.pytorch_utils import Conv1D

from lightning_automodel.plans.selection import wildcard
from lightning_automodel.styles import EMBEDDINGS, Style

Modules = Mapping[str, nn.Module]
Styles = Mapping[str, Style]


def check_styles(modules: Modules, module_styles: Styles, parameter_styles: Styles) -> None:
    """Checks each planned module against what its style is for.

    Args:
        modules: all modules of the model by name.
        module_styles: of the modules that the plan names.
        parameter_styles: of the parameters that it names, alone or with their module.

    Raises:
        ValueError: naming the rule, the module and what to write instead.
    """
    for name, style in module_styles.items():
        problem = _problem(modules[name], style) or _fused(name, modules, module_styles)
        if problem:
            raise ValueError(_message(name, modules[name], style, problem))
    for name, style in parameter_styles.items():
        owner = name.rpartition(".")[0]
        if owner not in module_styles and _splits(style) and isinstance(modules[owner], nn.Linear | nn.Embedding):
            problem = f"a rule about a parameter alone brings no collectives; name the module: {wildcard(owner)!r}"
            raise ValueError(_message(name, modules[owner], style, problem))


def _message(name: str, module: nn.Module, style: Style, problem: str) -> str:
    return (
        f"the tensor-parallel plan gives {wildcard(name)!r} ({type(module).__name__}) the style {style.name}, but "
        f"{problem}"
    )


def _splits(style: Style) -> bool:
    return not style.placement("weight", 2).is_replicate()


def _problem(module: nn.Module, style: Style) -> str:
    """What a style of this kind cannot do with a module of this kind; empty if it can."""
    named = ", ".join(EMBEDDINGS)
    if style.name in EMBEDDINGS and not isinstance(module, nn.Embedding):
        return f"{named} are for torch.nn.Embedding; use colwise or rowwise for a matrix product"
    if not _splits(style) or style.name in EMBEDDINGS:
        return ""
    if isinstance(module, nn.Embedding):
        return f"an embedding looks rows up; use one of {named}, or leave it whole: replicate"
    if next(module.parameters(recurse=False), None) is None:
        children = ", ".join(name for name, _ in module.named_children())
        return f"it holds no parameter of its own to split; name the modules that do (it holds {children})"
    if isinstance(module, Conv1D):
        return "its matrix is stored as [in, out], which no style splits; replace it by a torch.nn.Linear, or use tp=1"
    return ""


def _fused(name: str, modules: Modules, styles: Styles) -> str:
    """Several matrices one above the other, read by a module of fewer features: a rank needs its rows of each."""
    parent, module = name.rpartition(".")[0], modules[name]
    if styles[name].name != "colwise" or not isinstance(module, nn.Linear):
        return ""
    if len([other for other in _siblings(parent, styles) if styles[other].opens]) > 1:
        return ""
    for reader in _siblings(parent, styles):
        other = modules[reader]
        if styles[reader].closes and isinstance(other, nn.Linear) and module.out_features > other.in_features:
            return (
                f"it gives {module.out_features} features of which {wildcard(reader)} reads {other.in_features}: it "
                "holds several matrices, and contiguous rows of it are not a rank's share of each. Use packed_colwise "
                "where two stand one above the other (gate and up), interleaved_colwise where they alternate (query, "
                "key and value of each head), or leave both modules out of the plan"
            )
    return ""


def _siblings(parent: str, styles: Styles) -> Iterator[str]:
    return (name for name in styles if name.rpartition(".")[0] == parent)
