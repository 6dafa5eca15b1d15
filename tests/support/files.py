"""A model in files, which one process and a mesh read: what they train then starts where a user starts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from lightning_automodel.config import FSDP2Config
from lightning_automodel.loading import sharded_loading
from lightning_automodel.loading.placed_parameters import place, values_aside
from lightning_automodel.loading.whole_values import whole_values
from lightning_automodel.parallelizer import parallelize
from tests.support.families import image_text_families
from tests.support.float64 import as_written

CPU = torch.device("cpu")


def read(family: str, directory: Path, **options: Any) -> Any:
    """``from_pretrained`` of the family's auto class."""
    auto: Any = AutoModelForImageTextToText if family in image_text_families() else AutoModelForCausalLM
    with as_written():
        return auto.from_pretrained(directory, **options)


class Files:
    """A saved model of a family. Made on every rank, with one directory; rank 0 writes, unless it was written before.

    Args:
        family: its model type.
        directory: shared by the ranks.
        build: makes the model.
        experts: transformers' name of the implementation of experts; ``None``: its choice.
    """

    def __init__(self, family: str, directory: Path, build: Callable[[], nn.Module], experts: str | None) -> None:
        self.family, self.directory = family, directory
        self.options = {"attn_implementation": "eager", **({"experts_implementation": experts} if experts else {})}
        if dist.get_rank() == 0 and not directory.exists():
            model: Any = build()
            model.save_pretrained(directory)
        dist.barrier()

    def plain(self) -> Any:
        """The model on one process, in the default dtype."""
        return read(self.family, self.directory, dtype=torch.get_default_dtype(), **self.options)

    def on_mesh(self, model: nn.Module, mesh: DeviceMesh, config: FSDP2Config | None) -> Any:
        """The same on a mesh; ``model`` (from :meth:`plain`) is not looked at."""
        with sharded_loading(lambda built: parallelize(built, mesh, config), CPU):
            return self.plain()

    def adapted(self, model: nn.Module, mesh: DeviceMesh, adapt: Callable[[Any], Any], config: FSDP2Config) -> Any:
        """The same with what ``adapt`` adds."""
        return read_and_adapt(self.plain, adapt, mesh, config)


def read_and_adapt(build: Callable[[], Any], adapt: Callable[[Any], Any], mesh: DeviceMesh, config: FSDP2Config) -> Any:
    """``adapt(build())`` as a strategy makes it, where ``build`` reads files: placed, read, adapted, made parallel."""

    def make_parallel(built: nn.Module) -> None:
        parallelize(built, mesh, config)

    with sharded_loading(lambda built: place(built, make_parallel), CPU), whole_values():
        base = build()
        adapted = adapt(base)
    with values_aside(base):
        make_parallel(base)
    return adapted
