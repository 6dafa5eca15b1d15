"""Adapters and frozen parameters of the module that is configured from YAML: added, checked against what was asked."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import Any

from torch import nn

from lightning_automodel.config.proposals import proposal
from lightning_automodel.distributed.logs import log_once
from lightning_automodel.modules.four_bit import count_weights
from lightning_automodel.modules.wrappers import name_without_wrappers

_MOST_LISTED = 5


def adapter_config(peft: Any) -> Any:
    """Make a config of peft from its fields; one that is given passes.

    Raises:
        ValueError: if peft is not installed, or a field or a kind of adapter is not known.
    """
    if find_spec("peft") is None:
        raise ValueError("peft is not installed, which CausalLM(peft=...) needs; pip install lightning_automodel[peft]")
    from peft import PeftConfig, PeftType

    if not isinstance(peft, Mapping):
        return peft
    fields = {"peft_type": "LORA", "task_type": "CAUSAL_LM", **peft}
    kinds = [kind.value for kind in PeftType]
    if (kind := fields["peft_type"]) not in kinds:
        raise ValueError(
            f"peft has no peft_type={kind!r}{proposal(str(kind), kinds) or '; it has ' + ', '.join(kinds)}"
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Unexpected keyword arguments")  # an error below
        config = PeftConfig.from_peft_type(**fields)
    if unknown := sorted(fields.keys() - vars(config).keys()):
        known = sorted(name for name in vars(config) if not name.startswith("_"))
        hint = proposal(unknown[0], known, "peft.") or f"; it has {', '.join(known)}"
        raise ValueError(f"peft of CausalLM: {type(config).__name__} has no {', '.join(unknown)}{hint}")
    return config


def add_adapter(model: Any, peft: Any) -> Any:
    """Wrap ``model`` by adapters of peft.

    Args:
        model: whose parameters may be sharded.
        peft: a config of peft, or its fields; ``peft_type`` is LORA unless it is among them.

    Returns:
        peft's model.

    Raises:
        ValueError: if peft is not installed, a field is not known, or a target matches nothing.
    """
    config = adapter_config(peft)
    from peft import get_peft_model

    names = [name for name, _ in model.named_modules()] + [name for name, _ in model.named_parameters()]
    for field in ("target_modules", "modules_to_save", "target_parameters"):
        _check_targets(field, getattr(config, field, None), names)
    return get_peft_model(model, config)


def _check_targets(field: str, targets: Any, names: Sequence[str]) -> None:
    """Refuse names of layers that match nothing; peft does so only where none matches."""
    if targets is None or isinstance(targets, str):
        return
    unmatched = [t for t in targets if not any(name == t or name.endswith(f".{t}") for name in names)]
    if unmatched:
        ends = dict.fromkeys(name.rpartition(".")[2] for name in names if name)
        raise ValueError(
            f"{field} of peft: {', '.join(map(repr, sorted(unmatched)))} match nothing in the model; its modules and "
            f"parameters end in {', '.join(sorted(ends))}"
        )


def freeze(model: nn.Module, patterns: Iterable[str]) -> None:
    """Freeze the parameters whose name, or whose module's name, matches a pattern.

    Args:
        model: in place.
        patterns: as of files, of names without wrappers: ``model.layers.[0-9].*``.

    Raises:
        ValueError: for a pattern that matches nothing.
    """
    model = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    parameters = {name_without_wrappers(name): p for name, p in model.named_parameters(remove_duplicate=False)}
    for pattern in patterns:
        found = [p for name, p in parameters.items() if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")]
        if not found:
            listed = ", ".join(list(parameters)[:_MOST_LISTED])
            raise ValueError(f"freeze={pattern!r} matches no parameter; there are {listed}, ...")
        for parameter in found:
            parameter.requires_grad_(False)


def report_trainable(model: nn.Module, asked: str) -> None:
    """Log once how many of all parameters train.

    Args:
        model: whose parameters may be sharded; whole ones are counted.
        asked: what was configured, for the error.

    Raises:
        ValueError: if none does.
    """
    total, trainable = count_weights(model), count_weights(model, trainable=True)
    if trainable == 0:
        raise ValueError(f"no parameter trains with {asked}; freeze less, or add an adapter")
    log_once(f"{trainable:,} of {total:,} parameters train ({100 * trainable / total:.2f} %)")
