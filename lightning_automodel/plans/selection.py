"""Chooses the tensor-parallel plan of a model: the user's, one registered for its class, its own, else an error."""

import inspect
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from itertools import combinations

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle
from transformers import PreTrainedModel

from lightning_automodel.blocks import class_names
from lightning_automodel.config.values import check_tp_plan
from lightning_automodel.imports import import_class_from_path
from lightning_automodel.logs import log_once, warn_once
from lightning_automodel.plans.additions import ADDITIONS, OF_USERS
from lightning_automodel.plans.published import published_plan
from lightning_automodel.plans.terms import MEASURED, package
from lightning_automodel.plans.torch_styles import name_of_style
from lightning_automodel.styles import STYLES

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
    """

    rules: Mapping[str, str]
    source: str
    measured: bool = False

    def rule_for(self, name: str) -> str | None:
        """The pattern that applies to a module or parameter: the one with the fewest wildcards."""
        return next((pattern for pattern in _patterns(name) if pattern in self.rules), None)


def _patterns(name: str) -> Iterator[str]:
    """The name itself, then with one of its numbers replaced by ``*``, then with two, ..."""
    parts = name.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    for count in range(len(numbers) + 1):
        for stars in combinations(numbers, count):
            yield ".".join("*" if i in stars else part for i, part in enumerate(parts))


def wildcard(name: str) -> str:
    """Replaces the numbers of a qualified name: ``layers.3.mlp`` becomes ``layers.*.mlp``."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def select_plan(model: nn.Module, custom: Rules | str | None = None) -> Plan:
    """Chooses the plan of a model and logs its source once. Rules that match nothing are dropped and reported once.

    Args:
        model: a model whose parameters may be on the meta device.
        custom: rules of the user, with styles by name or as torch's ``ParallelStyle``; or the import path of such a
            dict, or of a function that returns one, with the model as its argument or without. They complete what is
            registered for the class, and that completes the model's own plan; both override rule by rule.

    Raises:
        ValueError: if there are no rules, none matches, or some have styles that are not known.
    """
    own, registered, rules = published_plan(model), _registered(model), _resolve(custom, model)
    merged = {**own, **registered, **rules}
    if not merged:
        raise ValueError(_no_plan(model))
    sources = {"of the model's own plan": own, "registered for its class": registered, "of a custom plan": rules}
    source = ", ".join(f"{len(found)} rules {where}" for where, found in sources.items() if found)
    log_once(f"{type(model).__name__}: tensor parallel by {source}")
    matching = _matching(merged, model, reported=own.keys() | rules.keys())
    of_user = bool(rules) or any(name in OF_USERS for module in model.modules() for name in class_names(module))
    return Plan(_named_styles(matching, model), source, measured=package(model) in MEASURED and not of_user)


def known_rules(model: nn.Module) -> Rules:
    """What the model publishes and what is registered for its class; empty if the user must bring a plan."""
    return {**published_plan(model), **_registered(model)}


def has_rules(model: nn.Module, custom: Rules | str | None) -> bool:
    """Whether tensor parallelism splits ``model``: one of transformers (without a plan, that is an error), or a module
    for which rules are known, or some of the user's match. Others are layers beside models, whole on every rank.
    """
    if isinstance(model, PreTrainedModel) or known_rules(model):
        return True
    rules = _resolve(custom, model)
    return bool(rules) and len(_unused(rules, model)) < len(rules)


def _registered(model: nn.Module) -> Rules:
    """Of every module in ``model`` with its prefix, the outermost last: they override those of what they hold."""
    rules: dict[str, str | ParallelStyle] = {}
    for prefix, module in reversed(list(model.named_modules())):
        found = next((ADDITIONS[name] for name in class_names(module) if name in ADDITIONS), {})
        rules |= {f"{prefix}.{rule}" if prefix else rule: style for rule, style in found.items()}
    return rules


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


def _matching(rules: Rules, model: nn.Module, reported: Set[str]) -> Rules:
    """Without the rules that match nothing. What is registered for a class covers variants of it, so it may."""
    name, unused = type(model).__name__, _unused(rules, model)
    dropped = [rule for rule in unused if rule in reported]
    if len(unused) == len(rules):
        names = [n for n, _ in model.named_parameters(remove_duplicate=False)]
        raise ValueError(
            f"none of the rules of the tensor-parallel plan matches a module or parameter of {name}: {unused}; its "
            f"parameters have names like {', '.join(names[-3:])} (* stands for a number)"
        )
    if dropped:
        warn_once(f"{name}: {len(dropped)} rules of its tensor-parallel plan match nothing and are dropped: {dropped}")
    return {rule: style for rule, style in rules.items() if rule not in unused}


def _unused(rules: Rules, model: nn.Module) -> list[str]:
    plan = Plan(dict.fromkeys(rules, ""), "")
    names = [n for n, _ in model.named_modules() if n]
    names += [n for n, _ in model.named_parameters(remove_duplicate=False)]
    used = {plan.rule_for(n) for n in names}
    return [rule for rule in rules if rule not in used]


def _named_styles(rules: Rules, model: nn.Module) -> dict[str, str]:
    plan = Plan(dict.fromkeys(rules, ""), "")
    embeddings = {plan.rule_for(name) for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    named = {rule: name_of_style(style, rule, is_embedding=rule in embeddings) for rule, style in rules.items()}
    unknown = {rule: style for rule, style in named.items() if style not in STYLES}
    if unknown:
        raise ValueError(
            f"the tensor-parallel plan of {type(model).__name__} has styles that are not known: {unknown}; use "
            f"{', '.join(STYLES)} in FSDP2Config(tp_plan={{...}}), which overrides rule by rule, or tp=1"
        )
    return named


def _no_plan(model: nn.Module) -> str:
    name = type(model).__name__
    remote = " (remote code)" if type(model).__module__.startswith("transformers_modules") else ""
    weights = dict.fromkeys(wildcard(name) for name, parameter in model.named_parameters() if parameter.ndim == 2)
    return (
        f"{name}{remote} publishes no tensor-parallel plan, so tp > 1 cannot split it; use tp=1, or give the rules "
        'yourself: FSDP2Config(tp_plan={"model.layers.*.self_attn.q_proj": "colwise", '
        '"model.layers.*.self_attn.o_proj": "rowwise", ...}) or register_tp_plan. Its matrices: '
        f"{', '.join(weights)}"
    )
