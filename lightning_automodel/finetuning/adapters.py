"""Adapters and frozen parameters of the module that is configured from YAML: added, checked against what was asked."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn

from lightning_automodel.checkpointing.hugging_face.models import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    holds_adapters,
)
from lightning_automodel.config.proposals import proposal
from lightning_automodel.distributed.logs import log_once
from lightning_automodel.modules.four_bit import count_weights
from lightning_automodel.modules.wrappers import name_without_wrappers

_MOST_LISTED, _LONGEST = 5, 300  # names; characters
_INCOMPLETE = "Found missing adapter keys"
"""How peft warns that a model has layers of which an adapter's file holds nothing."""


def adapter_config(peft: Any) -> Any:
    """Make a config of peft from its fields, or read that of a saved adapter; one that is given passes.

    Raises:
        ValueError: if peft is not installed, a field or a kind of adapter is not known, or no adapter was saved there.
    """
    if find_spec("peft") is None:
        raise ValueError("peft is not installed, which CausalLM(peft=...) needs; pip install lightning_automodel[peft]")
    from peft import PeftConfig, PeftType

    if isinstance(peft, str):
        return _saved_config(peft)
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


def _saved_config(name: str) -> Any:
    from peft import PeftConfig

    folder = Path(name)
    if folder.is_dir() and not holds_adapters(folder):
        held = ", ".join(sorted(path.name for path in folder.iterdir())[:_MOST_LISTED]) or "nothing"
        raise ValueError(f"peft={name!r} holds no {ADAPTER_CONFIG} (it holds {held}); give what save_pretrained wrote")
    try:
        config = PeftConfig.from_pretrained(name)
    except ValueError as error:
        raise ValueError(f"peft={name!r} is no saved adapter (here: {Path.cwd()}): {error}") from error
    except TypeError as error:
        raise ValueError(
            f"peft={name!r}: its {ADAPTER_CONFIG} holds not the fields of an adapter ({error}); copy or export it anew"
        ) from error
    except KeyError as error:
        raise ValueError(f"peft={name!r} is of peft_type {error}, which this version of peft does not know") from error
    config.inference_mode = False  # as it was before peft saved it
    return config


def check_adapter(peft: Any) -> None:
    """Refuse what :func:`add_adapter` could not add to any model; the arguments are its own.

    Raises:
        ValueError: for what :func:`adapter_config` refuses, or a directory without weights.
    """
    adapter_config(peft)
    folder = Path(peft) if isinstance(peft, str) else None
    if folder is not None and folder.is_dir() and not any((folder / file).is_file() for file in ADAPTER_WEIGHTS):
        held = ", ".join(sorted(path.name for path in folder.iterdir())[:_MOST_LISTED])
        raise ValueError(f"the adapter {peft!r} has none of {', '.join(ADAPTER_WEIGHTS)} (it holds {held})")


def add_adapter(model: Any, peft: Any) -> Any:
    """Wrap ``model`` by adapters of peft.

    Args:
        model: whose parameters may be sharded.
        peft: a config of peft, or its fields; ``peft_type`` is LORA unless it is among them. A directory, or a name on
            the hub, of a saved adapter: it is read and trains on, unless it is a prompt, which peft freezes.

    Returns:
        peft's model.

    Raises:
        ValueError: if peft is not installed, a field is not known, a target matches nothing, or what was saved is of
            another model.
    """
    config = adapter_config(peft)
    from peft import get_peft_model

    names = [name for name, _ in model.named_modules()] + [name for name, _ in model.named_parameters()]
    for field in ("target_modules", "modules_to_save", "target_parameters"):
        _check_targets(field, getattr(config, field, None), names)
    return _read_adapter(model, peft, config) if isinstance(peft, str) else get_peft_model(model, config)


def refuse_saved_prompt(peft: Any) -> None:
    """Refuse to train a prompt that was saved, of which peft's files hold what it came to and not how.

    Raises:
        ValueError: naming the way out.
    """
    if isinstance(peft, str) and adapter_config(peft).is_prompt_learning:
        raise ValueError(
            f"peft={peft!r} is a prompt, which peft does not train on once it is saved; go on from the checkpoint of "
            "its run (ckpt_path), or train a new one"
        )


def _read_adapter(model: Any, name: str, config: Any) -> Any:
    from peft import PeftModel

    trains, reason = not config.is_prompt_learning, ""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", _INCOMPLETE)
            adapted: Any = PeftModel.from_pretrained(model, name, is_trainable=trains)
        if trains:  # else a prompt, which lies beside the layers
            again = adapted.load_adapter(name, "default", is_trainable=True)
            if again.unexpected_keys:  # of which from_pretrained says nothing
                reason = f"it holds more, {', '.join(again.unexpected_keys)}"
    except (SafetensorError, OSError) as error:
        raise ValueError(f"the adapter {name!r} cannot be read: {error}; copy or export it anew") from error
    except (UserWarning, KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split())
    if reason:
        raise ValueError(
            f"the adapter {name!r} (made for {config.base_model_name_or_path!r}) is of another model than "
            f"{getattr(model, 'name_or_path', '')!r}: {reason[:_LONGEST]}"
        )
    return adapted


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
