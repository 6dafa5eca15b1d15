"""Chooses the tensor-parallel plan of a model: the user's, one registered for its class, its own, else an error."""

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from itertools import combinations

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle
from transformers import PreTrainedModel

from lightning_automodel.config.imports import import_class_from_path
from lightning_automodel.config.values import EXTENDS, check_tp_plan
from lightning_automodel.distributed.logs import log_once, warn_once
from lightning_automodel.modules.structure import class_names, find_blocks, find_names_of_ends, outermost
from lightning_automodel.modules.wrappers import without_wrappers
from lightning_automodel.plans.additions import ADDITIONS, CORRECTIONS, OF_USERS
from lightning_automodel.plans.conventions import conventional_plan
from lightning_automodel.plans.ends import plan_of_ends
from lightning_automodel.plans.known_code import MEASURED, package
from lightning_automodel.plans.published import published_plan
from lightning_automodel.plans.single_layers import plan_of_single_layers
from lightning_automodel.plans.styles import STYLES
from lightning_automodel.plans.torch_styles import name_of_style

Rules = Mapping[str, str | ParallelStyle]


@dataclass(frozen=True)
class Plan:
    """Rules from name pattern to style name, and where they come from.

    A pattern is the qualified name of a module or parameter in which ``*`` may stand for a number:
    ``model.layers.*.mlp.down_proj``.

    Attributes:
        rules: pattern to style.
        source: where they come from.
        measured: they are what this package or transformers brings for the class of the model, without a user's rules.
        dropped: rules of the plan that match nothing.
    """

    rules: Mapping[str, str]
    source: str
    measured: bool = False
    dropped: tuple[str, ...] = ()

    def rule_for(self, name: str) -> str | None:
        """Finds the pattern that applies to a module or parameter: the one with the fewest wildcards."""
        return next((pattern for pattern in _patterns(name) if pattern in self.rules), None)


def _patterns(name: str) -> Iterator[str]:
    """Yields the name itself, then with one of its numbers replaced by ``*``, then with two, ..."""
    parts = name.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    for count in range(len(numbers) + 1):
        for stars in combinations(numbers, count):
            yield ".".join("*" if i in stars else part for i, part in enumerate(parts))


def wildcard(name: str) -> str:
    """Replaces the numbers of a qualified name: ``layers.3.mlp`` becomes ``layers.*.mlp``."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def layers_of(name: str, module: nn.Module) -> str:
    """List the layers in ``module`` as rules name them, for errors that ask for a rule for each."""
    inside = module.named_modules(prefix=name)
    layers = (inner for inner, layer in inside if next(layer.parameters(recurse=False), None) is not None)
    return ", ".join(dict.fromkeys(map(wildcard, layers)))


def select_plan(model: nn.Module, custom: Rules | str | None = None) -> Plan:
    """Chooses the plan of a model and logs its source once. Rules that match nothing are dropped and reported once.

    Args:
        model: a model whose parameters may be on the meta device.
        custom: rules of the user, with styles by name or as torch's ``ParallelStyle``; or the import path of such a
            dict, or of a function that returns one, with the model as its argument or without. They replace the model's
            own plan and what is registered for its class; with ``"extends": "model"`` among them they complete and
            override these, rule by rule.

    Raises:
        ValueError: if there are no rules, none matches, or some have styles that are not known.
    """
    with without_wrappers(model):
        return _select_plan(model, custom)


def _select_plan(model: nn.Module, custom: Rules | str | None) -> Plan:
    sources = _sources(model, custom)
    merged = {rule: style for rules in sources.values() for rule, style in rules.items()}
    if not merged:
        raise ValueError(_no_plan(model))
    matching, dropped = _matching(
        merged, model, {rule for where in sources if where != _REGISTERED for rule in sources[where]}
    )
    source = _in_force(matching, sources, replaces=any(_own(model).values()) and list(sources) == [_CUSTOM])
    log_once(f"{type(model).__name__}: tensor parallelism by {source}")
    of_user = _CUSTOM in sources or any(name in OF_USERS for module in model.modules() for name in class_names(module))
    named = _named_styles(matching, model)
    is_measured = package(model) in MEASURED and not of_user and not sources.get(_CONVENTIONAL)
    return Plan(named, source, measured=is_measured, dropped=tuple(dropped))


_OWN, _REGISTERED, _CUSTOM = "of the model's own plan", "registered for its class", "of tp_plan"
_CONVENTIONAL = "by the names of its layers"
_COMPLETING = "by the names of layers that its plan leaves out"
_SINGLE = "for single layers, whose features are gathered"


def _sources(model: nn.Module, custom: Rules | str | None) -> dict[str, Rules]:
    """Returns the rules for ``model`` by where they come from, later ones before earlier ones."""
    rules = _resolve(custom, model)
    if not rules:
        return _known(model)
    mine: dict[str, Rules] = {_CUSTOM: {rule: style for rule, style in rules.items() if rule != EXTENDS}}
    return {**_known(model), **mine} if EXTENDS in rules else mine


def _in_force(matching: Rules, sources: Mapping[str, Rules], replaces: bool) -> str:
    """Say how many rules apply, and where they come from."""
    last = {rule: where for where, rules in sources.items() for rule in rules}
    counts = Counter(last[rule] for rule in matching)
    parts = [f"{counts[where]} {where}" for where in sources if counts[where]]
    instead = ", which replaces the model's own" if replaces else ""
    return f"{len(matching)} rules: {', '.join(parts)}{instead}"


def known_rules(model: nn.Module) -> Rules:
    """Collects what the model publishes, what is registered for its class, and for what these leave out of its blocks
    and at its ends what the names and sizes of layers tell; empty if the user must bring a plan. Some plans name the
    head alone.
    """
    with without_wrappers(model):
        return {rule: style for rules in _known(model).values() for rule, style in rules.items()}


def _known(model: nn.Module) -> dict[str, Rules]:
    own = _own(model)
    named, blocks = _named(own, model), list(find_blocks(model))
    where = _COMPLETING
    if not any(outermost(blocks, name) for name in named):
        where, named = _CONVENTIONAL, []
    pairs = conventional_plan(model, named)
    layers = plan_of_single_layers(model, named, {*named, *pairs})
    ends = plan_of_ends(model, named) if named or pairs or layers else {}
    found = {_SINGLE: layers, where: {**ends, **pairs}}
    return {**{source: _with_wildcards(rules, model) for source, rules in found.items()}, **own}


def _own(model: nn.Module) -> dict[str, Rules]:
    published = published_plan(model)
    return {_OWN: published, _REGISTERED: _registered(model, published)}


def _named(sources: Mapping[str, Rules], model: nn.Module) -> list[str]:
    """List the modules and parameters that rules name."""
    plan = Plan({rule: "" for rules in sources.values() for rule in rules}, "")
    names = (name for named in (model.named_modules(), model.named_parameters()) for name, _ in named)
    return [name for name in names if plan.rules and plan.rule_for(name)]


def _with_wildcards(styles: Rules, model: nn.Module) -> Rules:
    """Write one rule for layers of one style, where it names no other."""
    names: dict[str, list[str]] = {}
    for name, _ in (*model.named_modules(), *model.named_parameters(remove_duplicate=False)):
        names.setdefault(wildcard(name), []).append(name)
    alike = {pattern: {styles.get(name) for name in found} for pattern, found in names.items()}
    return {wildcard(n) if len(alike[wildcard(n)]) == 1 else n: style for n, style in styles.items()}


def has_rules(model: nn.Module, custom: Rules | str | None) -> bool:
    """Tells whether tensor parallelism splits ``model``: rules are known for it, or some of the user's match.

    Others are layers and encoders beside models, whole on every rank; without a plan a model of transformers with a
    head, which may be large, is an error.
    """
    with without_wrappers(model):
        return _has_rules(model, custom)


def _has_rules(model: nn.Module, custom: Rules | str | None) -> bool:
    resolved = _resolve(custom, model)
    known = _own(model) if resolved and EXTENDS not in resolved else _known(model)  # what a plan of the user replaces
    if any(known.values()) or (isinstance(model, PreTrainedModel) and model.get_output_embeddings() is not None):
        return True
    rules = {rule: style for rule, style in resolved.items() if rule != EXTENDS}
    return bool(rules) and len(_unused(rules, model)) < len(rules)


def _registered(model: nn.Module, published: Rules) -> Rules:
    """Collects rules registered for every module in ``model``, the outermost last: they override those of what they
    hold.
    """
    rules: dict[str, str | ParallelStyle] = {}
    for prefix, module in reversed(list(model.named_modules())):
        rules |= {rule: style for rule, style in _of_class(module, prefix, CORRECTIONS).items() if rule in published}
        rules |= _of_class(module, prefix, ADDITIONS)
    return rules


def _of_class(module: nn.Module, prefix: str, known: Mapping[str, Rules]) -> Rules:
    found: Rules = next((known[name] for name in class_names(module) if name in known), {})
    return {f"{prefix}.{rule}" if prefix else rule: style for rule, style in found.items()}


def _resolve(custom: Rules | str | None, model: nn.Module) -> Rules:
    if not isinstance(custom, str):
        return custom or {}
    found = import_class_from_path(custom)
    if callable(found):
        found = found(model) if inspect.signature(found).parameters else found()
    if not isinstance(found, Mapping):
        raise ValueError(f"tp_plan={custom!r} gives a {type(found).__name__}; it must be a dict of name to style")
    check_tp_plan(found)
    return found


def _matching(rules: Rules, model: nn.Module, reported: Set[str]) -> tuple[Rules, list[str]]:
    """Drop rules that match nothing. What is registered for a class covers variants of it, so some may."""
    name, unused = type(model).__name__, _unused(rules, model)
    if len(unused) == len(rules):
        names = [n for n, _ in model.named_parameters(remove_duplicate=False)]
        raise ValueError(
            f"none of the rules of the tensor-parallel plan matches a module or parameter of {name}: {unused}; its "
            f"parameters have names like {', '.join(names[-3:])} (* stands for a number)"
        )
    if dropped := [rule for rule in unused if rule in reported]:
        warn_once(f"{name}: {len(dropped)} rules of its tensor-parallel plan match nothing and are dropped: {dropped}")
    return {rule: style for rule, style in rules.items() if rule not in unused}, unused


def _unused(rules: Rules, model: nn.Module) -> list[str]:
    plan = Plan(dict.fromkeys(rules, ""), "")
    names = [n for n, _ in model.named_modules() if n]
    names += [n for n, _ in model.named_parameters(remove_duplicate=False)]
    used = {plan.rule_for(n) for n in names}
    return [rule for rule in rules if rule not in used]


def _named_styles(rules: Rules, model: nn.Module) -> dict[str, str]:
    plan = Plan(dict.fromkeys(rules, ""), "")
    embeddings = {plan.rule_for(name) for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    head = find_names_of_ends(model)[1]
    of_head = None if head is None else plan.rule_for(head)
    named = {rule: name_of_style(style, rule, rule in embeddings, rule == of_head) for rule, style in rules.items()}
    unknown = {rule: style for rule, style in named.items() if style not in STYLES}
    if unknown:
        raise ValueError(
            f"the tensor-parallel plan of {type(model).__name__} has styles that are not known: {unknown}; use "
            f"{', '.join(STYLES)} in "
            'FSDP2Config(tp_plan={"extends": "model", ...}), which overrides rule by rule, or tp=1'
        )
    return named


def _no_plan(model: nn.Module) -> str:
    name = type(model).__name__
    remote = " (remote code)" if type(model).__module__.startswith("transformers_modules") else ""
    weights = dict.fromkeys(wildcard(name) for name, parameter in model.named_parameters() if parameter.ndim == 2)
    return (
        f"{name}{remote} publishes no tensor-parallel plan, and the names of its layers tell none, so tp > 1 cannot "
        "split it; use tp=1, or give the rules "
        'yourself: FSDP2Config(tp_plan={"model.layers.*.self_attn.q_proj": "colwise", '
        '"model.layers.*.self_attn.o_proj": "rowwise", ...}) or register_tp_plan. Its matrices: '
        f"{', '.join(weights)}"
    )
