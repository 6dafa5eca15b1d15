"""Tells at the start of training what is about to run: a table on rank 0, a line for each subject, of the run as it is.

What the stages and the data say themselves, in lines of their own, is not repeated.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_automodel.checkpointing.files.storage import Location
from lightning_automodel.distributed.logs import log
from lightning_automodel.gradients import to_local_if_dtensor
from lightning_automodel.mesh import MeshSizes
from lightning_automodel.modules.four_bit import count_weights

WIDTH = 100
START_TABLE = "start_table.txt"
"""The table's file in the directory of a logger, with lines of any length."""
_COLUMN = 12


def tell_start(trainer: "pl.Trainer", module: "pl.LightningModule", sizes: MeshSizes, config: Any) -> None:
    """Log the table of :func:`start_table` on rank 0, and keep it where the numbers of the run are logged."""
    log(start_table(trainer, module, sizes, config))
    if trainer.is_global_zero:
        table = start_table(trainer, module, sizes, config, width=None)
        for folder in {logger.log_dir for logger in trainer.loggers if logger.log_dir}:
            Location.of(folder).make_folder()
            (Location.of(folder) / START_TABLE).write(f"{table}\n".encode())


def start_table(
    trainer: "pl.Trainer", module: "pl.LightningModule", sizes: MeshSizes, config: Any, width: int | None = WIDTH
) -> str:
    """Describe a run that is about to train.

    Args:
        trainer: whose loops and loaders are set up.
        module: made parallel, on its device.
        sizes: of the mesh.
        config: the switches of the strategy, a dataclass.
        width: of the lines, at most, in characters.
    """
    rows = [
        ("strategy", _mesh(trainer, sizes)),
        ("parameters", _parameters(module)),
        ("precision", _precision(trainer, module)),
        ("switches", _switches(config)),
        ("steps", _steps(trainer, module)),
        *(("output", place) for place in _places(trainer)),
    ]
    return "\n".join(["this run", *(f"  {name:<{_COLUMN}}{_short(text, width)}" for name, text in rows if text)])


def _short(text: str, width: int | None) -> str:
    room = len(text) if width is None else width - _COLUMN - 2
    return text if len(text) <= room else f"{text[: room - 3]}..."


def _mesh(trainer: "pl.Trainer", sizes: MeshSizes) -> str:
    named = {field.name: getattr(sizes, field.name) for field in dataclasses.fields(sizes)}
    ep = named.pop("ep", 1)
    axes = " x ".join(f"{name} {size}" for name, size in named.items() if size > 1) or "one rank"
    ranks = f" = {sizes.world} ranks" if sizes.world > 1 else ""
    nodes = f" on {trainer.num_nodes} nodes" if trainer.num_nodes > 1 else ""
    experts = f", ep {ep}" if ep > 1 else ""
    device = trainer.strategy.root_device.type
    return f"{type(trainer.strategy).__name__}, {axes}{ranks}{experts}{nodes}, {device}"


def _parameters(module: nn.Module) -> str:
    parameters = list(module.parameters())
    total, training = count_weights(module), count_weights(module, trainable=True)
    share = "all train" if training == total else f"{training:,} train ({training / max(total, 1):.2%})"
    own = sum(_bytes(parameter) for parameter in parameters)
    gradients = sum(_bytes(parameter) for parameter in _trained(parameters))
    return f"{total:,}, {share}; rank 0 holds {_size(own)} of them, and gradients of {_size(gradients)}"


def _trained(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    return [parameter for parameter in parameters if parameter.requires_grad]


def _bytes(tensor: Tensor) -> int:
    local = to_local_if_dtensor(tensor)
    return local.numel() * local.element_size()


def _size(size: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size / 2**10:.1f} KiB"


def _precision(trainer: "pl.Trainer", module: nn.Module) -> str:
    stored = sorted({str(parameter.dtype).removeprefix("torch.") for parameter in module.parameters()})
    return f"{trainer.precision}, parameters stored in {' and '.join(stored)}"


def _switches(config: Any) -> str:
    """Write the switches that are not as they are by default."""
    default = type(config)()
    fields = ((field.name, getattr(config, field.name)) for field in dataclasses.fields(config))
    return ", ".join(f"{name}={value}" for name, value in fields if value != getattr(default, name))


def _steps(trainer: "pl.Trainer", module: "pl.LightningModule") -> str:
    batches, micro_batches = trainer.num_training_batches, trainer.accumulate_grad_batches
    if not module.automatic_optimization:
        return f"{batches:,} batches of each data rank per epoch; the module takes its own steps"
    each = f" of {micro_batches} micro-batches" if micro_batches > 1 else ""
    if math.isinf(batches):
        return f"{trainer.max_steps:,}{each}" if trainer.max_steps > 0 else f"until something ends the run{each}"
    per_epoch = math.ceil(batches / micro_batches)
    bounds = [per_epoch * epochs for epochs in (trainer.max_epochs or -1,) if epochs > 0]
    bounds += [trainer.max_steps] if trainer.max_steps > 0 else []
    total = f"{min(bounds):,}" if bounds else "until something ends the run"
    done = f", {trainer.global_step:,} done" if trainer.global_step else ""
    return f"{total}{done}; {per_epoch:,} per epoch{each}"


def _places(trainer: "pl.Trainer") -> Iterator[str]:
    for logger in trainer.loggers:
        if folder := logger.log_dir or logger.save_dir:
            yield f"logs in {folder}"
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if folder := getattr(callback, "dirpath", None):
            kind = "checkpoints" if isinstance(callback, ModelCheckpoint) else type(callback).__name__
            yield f"{kind} in {folder}"
