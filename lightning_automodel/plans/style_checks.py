"""Checks that the styles of a plan fit the modules that they name: a misfit would run, and give other numbers."""

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.nn.utils.parametrize import is_parametrized

from lightning_automodel._compat.dtensor.tensors import StridedShard
from lightning_automodel.modules.matrices import Matrix, in_features, out_features
from lightning_automodel.modules.structure import names_around
from lightning_automodel.modules.wrappers import is_wrapper
from lightning_automodel.plans.own_linears import problem_of_own_linear
from lightning_automodel.plans.selection import wildcard
from lightning_automodel.plans.styles import EMBEDDINGS, TURNED, Enter, Leave, Style

Modules = Mapping[str, nn.Module]
Styles = Mapping[str, Style]
_Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d


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
        problem = _problem(modules[name], style) or _problem_of_place(name, modules, style)
        problem = problem or _fused(name, modules, module_styles)
        if problem:
            raise ValueError(_message(name, modules[name], style, problem))
    alike = {(wildcard(name), type(modules[name])): name for name in reversed(list(module_styles))}
    for name in alike.values():  # one of each kind: it is tried with a weight of its size
        if problem := problem_of_own_linear(modules[name], module_styles[name]):
            raise ValueError(_message(name, modules[name], module_styles[name], problem))
    named = {id(modules[name]) for name in module_styles}
    for name, style in parameter_styles.items():
        owner = name.rpartition(".")[0]
        if problem := _problem_of_place(name, modules, style):
            raise ValueError(_message(name, modules[owner], style, problem))
        if id(modules[owner]) not in named and _splits(style) and isinstance(modules[owner], nn.Linear | nn.Embedding):
            problem = f"a rule about a parameter alone brings no collectives; name the module: {wildcard(owner)!r}"
            raise ValueError(_message(name, modules[owner], style, problem))


def check_sums(modules: Modules, module_styles: Styles, parameter_styles: Styles, dropped: Sequence[str]) -> None:
    """Checks that each module whose output is summed over tp computes with slices.

    A module that holds no parameter is taken at its rule's word.

    Args:
        modules: all modules of the model by name.
        module_styles: of the modules that the plan names.
        parameter_styles: of the parameters that it names, alone or with their module.
        dropped: rules of the plan that match nothing.

    Raises:
        ValueError: naming the rule, the module, a parameter that is whole, and the rules that should have split it.
    """
    for name, style in module_styles.items():
        if style.leave not in _SUMS or _splits(style):
            continue
        parameters = dict(modules[name].named_parameters(name))
        split = {p for p, value in parameters.items() if _is_split(p, value, parameter_styles)}
        named = {p for p in parameters if parameter_styles.get(p) not in (None, style)} if split else set()
        # Attention that counts its heads may hold norms of single heads.
        whole = [p for p, value in parameters.items() if p not in split | named and value.ndim > int(style.divides)]
        if whole:
            lacking = [rule for rule in dropped if rule.startswith(f"{wildcard(name)}.")]
            problem = _whole_in_sum(whole[0], lacking)
            if _is_in_layer(whole[0], name, modules) and not lacking:
                problem = _whole_layer(whole[0].rpartition(".")[0], style)
            raise ValueError(_message(name, modules[name], style, problem))


def check_ends(modules: Modules, module_styles: Styles, parameter_styles: Styles) -> None:
    """Checks that what gives a rank its features alone is followed by what sums over the ranks, and the other way.

    A module that sums does so for all modules of the nearest one around it in which any gives features alone, and for
    those beside it and beside what is around it in their own.

    Args:
        modules: all modules of the model by name.
        module_styles: of the modules that the plan names.
        parameter_styles: of the parameters that it names, alone or with their module.

    Raises:
        ValueError: naming the rule, the module, and the style that gives or takes whole features.
    """
    begin = [n for n, s in module_styles.items() if s.enter is Enter.COPY and s.leave is Leave.NONE and s.opens]
    others = {name: style for name, style in module_styles.items() if not isinstance(modules[name], nn.Embedding)}
    ended = {name for name in begin if any(name.startswith(f"{n}.") for n, s in others.items() if s.leave in _SUMS)}
    sums = [n for n, s in others.items() if s.enter is not Enter.COPY_ALL and (s.closes or s.leave in _SUMS)]
    ended |= {found for name in sums for found in _nearest(name, begin)} | _beside(begin, sums)
    rows = [n for n in sums if others[n].closes and others[n].enter is Enter.NONE and isinstance(modules[n], Matrix)]
    opening = [name for name, style in parameter_styles.items() if style.opens and style.leave is Leave.NONE]
    fed = {found for name in opening for found in _nearest(name, rows)} | _beside(rows, opening)
    for names, matched, problem in ((begin, ended, _NO_SUM), (rows, fed, _NO_PART)):
        for name in names:
            if name not in matched:
                raise ValueError(_message(name, modules[name], module_styles[name], problem))


_NO_SUM = (
    "no module around it or beside it has one that sums over the ranks (rowwise), so what reads it would see a rank's "
    "share of its features; use colwise_gather_output, or plan the module that reads it, too"
)
_NO_PART = (
    "no layer beside it gives a rank its features alone (colwise), so it would be handed all of them; use "
    "rowwise_split_input, or plan the layers before it, too"
)


def check_places(model: nn.Module, parts: Sequence[str], why: str, but: Sequence[str] = ()) -> None:
    """Checks that a module that stands in several places sees whole values in all of them, or a part in all.

    Args:
        model: the whole model.
        parts: names of modules in which a rank has a part of the values, under every name that they have.
        why: what makes it a part.
        but: names of modules inside of ``parts`` where it has all, in the same way.

    Raises:
        ValueError: naming a module, and two of its places.
    """
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if next(module.parameters(recurse=False), None) is not None:
            names.setdefault(id(module), []).append(name)
    for places in names.values():
        inside = [n for n in places if _is_below(n, parts) and not _is_below(n, but)]
        if 0 < len(inside) < len(places):
            outside = next(name for name in places if name not in inside)
            raise ValueError(
                f"{inside[0]} and {outside} are one module, and the first stands in a part of the model that {why}: "
                "its gradients would be a rank's part there, and whole in the other place. Use two modules, with "
                "parameters of their own, or tp=1"
            )


def _is_below(name: str, modules: Sequence[str]) -> bool:
    return any(name == other or name.startswith(f"{other}.") for other in modules)


def _nearest(name: str, others: Sequence[str]) -> list[str]:
    """List those of ``others`` that stand in the nearest module around ``name`` in which any of them stands."""
    around = name
    while around:
        around = around.rpartition(".")[0]
        found = [other for other in others if not around or other.startswith(f"{around}.")]
        if found:
            return found
    return []


def _beside(names: Sequence[str], others: Sequence[str]) -> set[str]:
    """Find those of ``names`` that stand in a module which holds any of ``others``, at any depth."""
    around = names_around(others)
    return {name for name in names if name.rpartition(".")[0] in around}


_SUMS = (Leave.REDUCE, Leave.REDUCE_ALL, Leave.REDUCE_SPLIT)


def _is_split(name: str, parameter: nn.Parameter, styles: Styles) -> bool:
    style = styles.get(name)
    return style is not None and not style.placement(name.rpartition(".")[2], parameter.ndim).is_replicate()


def _whole_in_sum(parameter: str, lacking: Sequence[str]) -> str:
    because = f"the rules {', '.join(map(repr, lacking))} match nothing" if lacking else "no rule splits it"
    return (
        f"{parameter} is whole on every tp rank, so their sum would count what it gives tp times: {because}. Where an "
        "adapter wraps the module, name the layers to adapt without it (peft: target_modules=['q_proj', 'v_proj'] and "
        "not 'all-linear'); else write a rule with the parameter's name into "
        f'FSDP2Config(tp_plan={{"extends": "model", {wildcard(parameter)!r}: ...}}), or use tp=1'
    )


def _is_in_layer(parameter: str, name: str, modules: Modules) -> bool:
    """Tell whether ``parameter`` is of a linear layer within the module ``name``, in which nothing is adapted."""
    owner = parameter.rpartition(".")[0]
    is_adapted = any(is_wrapper(module) for module in modules[name].modules())
    return owner != name and isinstance(modules[owner], nn.Linear) and not is_adapted


def _whole_layer(layer: str, style: Style) -> str:
    return (
        f"{layer} is whole on every tp rank, so their sum would count what it gives tp times: {style.name} says that "
        "the module sums, and splits none of the layers in it (of experts it divides those that are stacked in "
        "parameters of the module itself, whole ones with grouped_gemm for each). Give those layers rules too, "
        f"colwise where features enter and rowwise where they leave ({wildcard(layer)!r}: 'colwise'), or leave the "
        "rule out, or use tp=1, where FSDP2 shards them"
    )


def _message(name: str, module: nn.Module, style: Style, problem: str) -> str:
    return (
        f"the tensor-parallel plan gives {wildcard(name)!r} ({type(module).__name__}) the style {style.name}, but "
        f"{problem}"
    )


def _splits(style: Style) -> bool:
    return not style.placement("weight", 2).is_replicate()


def _problem(module: nn.Module, style: Style) -> str:
    """Says what a style of this kind cannot do with a module of this kind; empty if it can."""
    named = ", ".join(EMBEDDINGS)
    if style.name in EMBEDDINGS and not isinstance(module, nn.Embedding):
        return f"{named} are for torch.nn.Embedding; use colwise or rowwise for a matrix product"
    if not _splits(style):
        return ""
    if isinstance(module, nn.Embedding) and style.name not in EMBEDDINGS:
        return f"an embedding looks rows up; use one of {named}, or leave it whole: replicate"
    if is_parametrized(module):
        return (
            "its weight is computed from other parameters (torch.nn.utils.parametrize), of which it is not known how "
            "they are split; remove_parametrizations makes a plain weight of it before training, or use tp=1"
        )
    if isinstance(vars(module).get("weight"), Tensor):
        return (
            "its weight is computed from other parameters by a hook (prune, weight_norm or spectral_norm of "
            "torch.nn.utils), of which it is not known how they are split; prune.remove, remove_weight_norm or "
            "remove_spectral_norm makes a plain weight of it before training, or use tp=1"
        )
    if next(module.parameters(recurse=False), None) is None:
        children = ", ".join(name for name, _ in module.named_children())
        return (
            f"it holds no parameter of its own to split. Give it the rule 'replicate', and {style.name} to those in it "
            f"that {'give' if style.opens else 'read'} the features which are split (it holds {children}); or "
            "'replicate' to it and to all that compute with its features. If it adapts a layer: peft's adapters "
            "(get_peft_model) are split along with their layer, without a rule"
        )
    return _problem_of_storage(module, style)


def _problem_of_storage(module: nn.Module, style: Style) -> str:
    """Says why a style would not cut a weight by its features; empty if it would."""
    if isinstance(module, _Convolution) and style.placement("weight", module.weight.ndim) != Shard(0):
        return (
            "it is a convolution, whose weight [out, in / groups, ...] this style would cut within a channel: "
            "leave it and what reads its channels out of the plan, or use tp=1"
        )
    if isinstance(module, Matrix) and style.name in TURNED:
        return (
            f"this style is for stacked matrices [..., in, out] of a module's own; use {style.name[len('turned_') :]}"
        )
    placement = style.placement("weight", 2)
    if not isinstance(module, Matrix) or not isinstance(placement, StridedShard):
        return ""
    matrices = int(placement.split_factor)
    width = out_features(module) if style.enter is Enter.COPY else in_features(module)
    if width % matrices:
        return (
            f"its {width} features are not {matrices} matrices of one width. Where they are matrices of several widths "
            "(fewer heads of keys and values than of queries), use colwise_gather_output for it and "
            "rowwise_split_input for what reads its features, or leave both out of the plan"
        )
    return ""


def _problem_of_place(name: str, modules: Modules, style: Style) -> str:
    """Says why what stands under ``name``, a module or a parameter, is not to be split there; empty if it may be."""
    parent = name.rpartition(".")[0]
    holder = next((n for n in (name, parent) if isinstance(modules.get(n), nn.MultiheadAttention)), None)
    if holder is None or not _splits(style):
        return ""
    return (
        f"torch.nn.MultiheadAttention computes with all matrices of {wildcard(holder)} itself, for as many heads as it "
        "was made with, so that no style divides them: leave it and what is in it out of the plan, or use tp=1"
    )


def _fused(name: str, modules: Modules, styles: Styles) -> str:
    """Finds several matrices one above the other, read by a module of fewer features: a rank needs its rows of each."""
    parent, module = name.rpartition(".")[0], modules[name]
    if styles[name].name != "colwise" or not isinstance(module, Matrix):
        return ""
    if len([other for other in _siblings(parent, styles) if styles[other].opens]) > 1:
        return ""
    for reader in _siblings(parent, styles):
        other = modules[reader]
        if not styles[reader].closes or not isinstance(other, Matrix):
            continue
        if out_features(module) > in_features(other):
            return (
                f"it gives {out_features(module)} features of which {wildcard(reader)} reads {in_features(other)}: it "
                "holds several matrices, and contiguous rows of it are not a rank's share of each. Use packed_colwise "
                "where two stand one above the other (gate and up), packed_qkv_colwise for a query, key and value of "
                "one width, interleaved_colwise where these alternate head by head, or leave both modules out of the "
                "plan"
            )
    return ""


def _siblings(parent: str, styles: Styles) -> Iterator[str]:
    return (name for name in styles if name.rpartition(".")[0] == parent)
