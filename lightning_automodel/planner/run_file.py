"""Reads what the YAML file of a run says of what is planned, and writes such a file."""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from lightning_automodel.config import FSDP2Config
from lightning_automodel.finetuning.image_text import is_image_text
from lightning_automodel.finetuning.pretrained import Pretrained
from lightning_automodel.planner.optimizers import as_in_files
from lightning_automodel.planner.play import Run

FIELDS = frozenset(field.name for field in dataclasses.fields(FSDP2Config))
SIZES = ("tp", "cp", "ep", "dp_shard", "dp_replicate")
OF_MODEL = ("model", "model_kwargs", "peft", "freeze", "optimizer")
_OURS = ("CausalLM", "ImageTextLM", "TextDataModule", "ImageTextDataModule")
_AVERAGES = "WeightAveraging"  # with what stands before it, the callbacks of Lightning that keep a copy of the weights


def read_run(path: str, whole: Mapping[str, Any]) -> dict[str, Any]:
    """Read what a run's file says, by the names of the arguments of ``plan``; ``averages``: callbacks that keep some.

    Args:
        path: of the file, for errors.
        whole: what :func:`load` has read there.

    Raises:
        ValueError: if its strategy is another one.
    """
    trainer = whole.get("trainer") or {}
    strategy = trainer.get("strategy") or {}
    name = strategy if isinstance(strategy, str) else strategy.get("class_path") or "FSDP2TPStrategy"
    if name.rpartition(".")[2] not in ("FSDP2TPStrategy", "fsdp2_tp"):
        raise ValueError(f"config={path!r} has the strategy {name}; plan knows FSDP2TPStrategy")
    arguments, data, model = map(_arguments, (strategy, whole.get("data"), whole.get("model")))
    found = {
        "world": _world(trainer),
        "seq": data.get("sequence_length"),
        "micro_batch": data.get("batch_size"),
        "accumulate": trainer.get("accumulate_grad_batches"),
        "precision": trainer.get("precision"),
        "clips": trainer.get("gradient_clip_val") is not None,
        "averages": list(_averages(trainer.get("callbacks"))) or None,
        **{name: model.get(name) for name in OF_MODEL},
        **{name: arguments.get(name) for name in SIZES},
    }
    known = {key: value for key, value in found.items() if value is not None}
    return {**known, "switches": _arguments(arguments.get("config"))}


def load(path: str) -> dict[str, Any]:
    """Read the sections of a run's file.

    Raises:
        ValueError: if there is no such file, or it has none.
    """
    if not Path(path).is_file():
        raise ValueError(f"config={path!r}: there is no such file")
    try:
        whole = yaml.safe_load(Path(path).read_text()) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"config={path!r} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(whole, dict):
        raise ValueError(f"config={path!r} has no sections (trainer, model, data): it is no file of a run")
    return whole


def _world(trainer: Mapping[str, Any]) -> int | None:
    """Count the processes of a run, if its file says how many: devices 8, '8' (of --print_config), '0,1' or [0, 1]."""
    devices = trainer.get("devices")
    if isinstance(devices, str) and "," in devices:
        devices = [one for one in devices.split(",") if one.strip()]
    count = str(len(devices) if isinstance(devices, list) else devices)
    return int(count) * int(trainer.get("num_nodes") or 1) if count.isdigit() else None


def _averages(callbacks: Any) -> Iterator[str]:
    for one in callbacks if isinstance(callbacks, list) else [callbacks]:
        path = one.get("class_path") if isinstance(one, dict) else one
        if isinstance(path, str) and path.endswith(_AVERAGES):
            yield path.rpartition(".")[2]


def _arguments(section: Any) -> dict[str, Any]:
    """Return what a section of a run's file gives its class: ``fit`` takes it beside ``class_path``, too."""
    if not isinstance(section, dict):
        return {}
    return section.get("init_args", {key: value for key, value in section.items() if key != "class_path"}) or {}


def yaml_of(told: Mapping[str, Any], run: Run, devices: int, like: Mapping[str, Any]) -> dict[str, Any]:
    """Write a run of the model that was told as the YAML file of the command has it.

    Args:
        told: what :func:`read_run` returns, of which the names of the model's arguments are read.
        run: the others.
        devices: of a node.
        like: sections of the file that was read, of which all stays that is not planned; those of none: {}.
    """
    sizes, default = run.sizes, FSDP2Config()
    switches = {
        name: value for name in sorted(FIELDS) if (value := getattr(run.config, name)) != getattr(default, name)
    }
    local = min(sizes.world, devices)
    trainer = {
        "accelerator": "gpu",
        "devices": local,
        "num_nodes": sizes.world // local,
        "precision": run.precision,
        "accumulate_grad_batches": run.accumulation,
    }
    axes = {"tp": sizes.tp, "cp": sizes.cp, "ep": sizes.ep, "dp_replicate": sizes.dp_replicate}
    others = _arguments((like.get("trainer") or {}).get("strategy"))
    kept = {name: value for name, value in others.items() if name not in SIZES}
    strategy = {
        "class_path": "lightning_automodel.FSDP2TPStrategy",
        "init_args": {**kept, **axes, "config": switches},
    }
    clips = {} if like else {"gradient_clip_val": 1.0}
    rows = {"sequence_length": run.sequence_length, "batch_size": run.micro_batch}
    model, data = _classes(told, like)
    return {
        **like,
        "trainer": {**(like.get("trainer") or {}), **trainer, **clips, "strategy": strategy},
        "model": _section(like.get("model"), model, _model_of(told)),
        "data": _section(like.get("data"), data, rows),
    }


def _classes(told: Mapping[str, Any], like: Mapping[str, Any]) -> tuple[str, str]:
    """Return the paths of the classes that train such a model, and read its data, where a file names none."""
    reads_images = False
    if not like:
        config, _ = Pretrained.of(told["model"]).find_config(told.get("model_kwargs", {}))
        reads_images = is_image_text(config)
    names = ("ImageTextLM", "ImageTextDataModule") if reads_images else ("CausalLM", "TextDataModule")
    model, data = (f"lightning_automodel.finetuning.{name}" for name in names)
    return model, data


def _section(before: Any, default: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Put arguments into a section of a run's file; a class of the user's, which need not take them, keeps its own."""
    path = (before.get("class_path") if isinstance(before, dict) else before) or default
    known = path.rpartition(".")[2] in _OURS
    return {"class_path": path, "init_args": {**_arguments(before), **(arguments if known else {})}}


def _model_of(told: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: told[name] for name in OF_MODEL if name in told}
    return {**found, "optimizer": as_in_files(found["optimizer"])} if "optimizer" in found else found
