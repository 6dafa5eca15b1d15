"""Reads what the YAML file of a run says of what is planned, and writes such a file."""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from lightning_automodel.config import FSDP2Config
from lightning_automodel.planner.optimizers import as_in_files
from lightning_automodel.planner.play import Run

FIELDS = frozenset(field.name for field in dataclasses.fields(FSDP2Config))
SIZES = ("tp", "cp", "ep", "dp_shard", "dp_replicate")
OF_MODEL = ("model", "model_kwargs", "peft", "freeze", "optimizer")
_AVERAGES = "WeightAveraging"  # with what stands before it, the callbacks of Lightning that keep a copy of the weights


def read_run(path: str) -> dict[str, Any]:
    """Read what a run's file says, by the names of the arguments of ``plan``; ``averages``: callbacks that keep some.

    Raises:
        ValueError: if there is no such file, or its strategy is another one.
    """
    if not Path(path).is_file():
        raise ValueError(f"config={path!r}: there is no such file")
    whole = yaml.safe_load(Path(path).read_text()) or {}
    trainer = whole.get("trainer") or {}
    strategy = trainer.get("strategy") or {}
    name = strategy if isinstance(strategy, str) else strategy.get("class_path", "FSDP2TPStrategy")
    if name.rpartition(".")[2] not in ("FSDP2TPStrategy", "fsdp2_tp"):
        raise ValueError(f"config={path!r} has the strategy {name}; plan knows FSDP2TPStrategy")
    arguments, data, model = map(_arguments, (strategy, whole.get("data"), whole.get("model")))
    devices, nodes = trainer.get("devices") or "auto", trainer.get("num_nodes", 1)
    found = {
        "world": int(devices) * nodes if str(devices).isdigit() else None,  # --print_config writes '8'
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


def _averages(callbacks: Any) -> Iterator[str]:
    for one in callbacks if isinstance(callbacks, list) else [callbacks]:
        path = one if isinstance(one, str) else (one or {}).get("class_path", "")
        if path.endswith(_AVERAGES):
            yield path.rpartition(".")[2]


def _arguments(section: Any) -> dict[str, Any]:
    """Return what a section of a run's file gives its class: ``fit`` takes it beside ``class_path``, too."""
    if not isinstance(section, dict):
        return {}
    return section.get("init_args", {key: value for key, value in section.items() if key != "class_path"}) or {}


def yaml_of(told: Mapping[str, Any], run: Run, devices: int) -> dict[str, Any]:
    """Write a run of the model that was told as the YAML file of the command has it; files are left to the user.

    Args:
        told: what :func:`read_run` returns, of which the names of the model's arguments are read.
        run: the others.
        devices: of a node.
    """
    sizes, default = run.sizes, FSDP2Config()
    switches = {
        name: value for name in sorted(FIELDS) if (value := getattr(run.config, name)) != getattr(default, name)
    }
    local = min(sizes.world, devices)
    return {
        "trainer": {
            "accelerator": "gpu",
            "devices": local,
            "num_nodes": sizes.world // local,
            "precision": run.precision,
            "accumulate_grad_batches": run.accumulation,
            "gradient_clip_val": 1.0,
            "strategy": {
                "class_path": "lightning_automodel.FSDP2TPStrategy",
                "init_args": {
                    "tp": sizes.tp,
                    "cp": sizes.cp,
                    "ep": sizes.ep,
                    "dp_replicate": sizes.dp_replicate,
                    "config": switches,
                },
            },
        },
        "model": {
            "class_path": "lightning_automodel.finetuning.CausalLM",
            "init_args": _model_of(told),
        },
        "data": {
            "class_path": "lightning_automodel.finetuning.TextDataModule",
            "init_args": {"sequence_length": run.sequence_length, "batch_size": run.micro_batch},
        },
    }


def _model_of(told: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: told[name] for name in OF_MODEL if name in told}
    return {**found, "optimizer": as_in_files(found["optimizer"])} if "optimizer" in found else found
