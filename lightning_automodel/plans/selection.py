"""Chooses the tensor-parallel plan of a model: the user's, else the model's own, else an error that shows the way."""

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from lightning_automodel.logs import log_once, warn_once
from lightning_automodel.plans.additions import ADDITIONS


@dataclass(frozen=True)
class Plan:
    """Rules from name pattern to style name, and where they come from.

    A pattern is the qualified name of a module or parameter in which ``*`` stands for a layer number:
    ``model.layers.*.mlp.down_proj``.
    """

    rules: Mapping[str, str]
    source: str

    def rule_for(self, name: str) -> str | None:
        """The pattern that applies to a module or parameter: its exact name before the one with wildcards."""
        return next((key for key in (name, wildcard(name)) if key in self.rules), None)


def wildcard(name: str) -> str:
    """Replaces the numbers of a qualified name: ``layers.3.mlp`` becomes ``layers.*.mlp``."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)


def select_plan(model: nn.Module, custom: Mapping[str, str] | str | None = None) -> Plan:
    """Chooses the plan of a model and logs its source once.

    Args:
        model: a model whose parameters may be on the meta device.
        custom: rules of the user, or the import path of a dict of rules or of a function ``model -> dict``. They
            complete the model's own plan and override it rule by rule.

    Raises:
        ValueError: if there is neither a custom plan nor one that the model publishes.
    """
    own = {**(getattr(model, "tp_plan", None) or {}), **ADDITIONS.get(type(model).__name__, {})}
    rules = _resolve(custom, model)
    name = type(model).__name__
    if not own and not rules:
        raise ValueError(_no_plan(name))
    source = f"the model's own plan ({len(own)} rules)" if own else "a custom plan"
    if own and rules:
        source += f", with {len(rules)} custom rules"
    plan = Plan({**own, **rules}, source)
    _report(plan, model, name)
    return plan


def _resolve(custom: Mapping[str, str] | str | None, model: nn.Module) -> dict[str, str]:
    rules = _imported(custom, model) if isinstance(custom, str) else dict(custom or {})
    bad = {key: style for key, style in rules.items() if not isinstance(style, str)}
    if bad:
        raise ValueError(f"tp_plan maps names to style names (str); got {bad}")
    return rules


def _imported(path: str, model: nn.Module) -> dict[str, str]:
    module, _, attribute = path.rpartition(".")
    if not module:
        raise ValueError(f"tp_plan={path!r} is not an import path; write package.module.name")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"tp_plan={path!r} cannot be imported: {error}") from error
    return dict(found(model) if callable(found) else found)


def _no_plan(name: str) -> str:
    return (
        f"{name} publishes no tensor-parallel plan, so tp > 1 cannot split it; use tp=1, or give the rules yourself: "
        'FSDP2Config(tp_plan={"model.layers.*.self_attn.q_proj": "colwise", '
        '"model.layers.*.self_attn.o_proj": "rowwise", ...})'
    )


def _report(plan: Plan, model: nn.Module, name: str) -> None:
    log_once(f"{name}: tensor parallel by {plan.source}")
    names = {n for n, _ in model.named_modules()} | {n for n, _ in model.named_parameters(remove_duplicate=False)}
    used = {plan.rule_for(n) for n in names}
    unused = [rule for rule in plan.rules if rule not in used]
    if unused:
        warn_once(f"{name}: {len(unused)} rules of its tensor-parallel plan match nothing and are dropped: {unused}")
