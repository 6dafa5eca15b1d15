"""Lets ``load_from_checkpoint``, which reads one file, read a folder: whole, on each process that calls it."""

import os
from typing import Any

import torch
from torch import Tensor

from lightning_automodel._compat.lightning.trainer import read_folders
from lightning_automodel.checkpointing.files.dcp import StoredTensor
from lightning_automodel.checkpointing.files.reading import read_sound
from lightning_automodel.checkpointing.files.storage import Location


def let_lightning_read_folders() -> None:
    """Teaches the ``load_from_checkpoint`` of all modules. Called by what a user makes of this package, since importing
    it changes nothing of others.
    """
    read_folders(_is_folder, _read)


def _is_folder(path: str | os.PathLike[str]) -> bool:
    # Lightning downloads these, and no file system lists folders there.
    return not str(path).startswith(("http://", "https://")) and Location.of(path).is_folder()


def _read(path: str | os.PathLike[str], map_location: Any, weights_only: bool | None) -> dict[str, Any]:
    """Reads a folder as a file would be, but for the states of optimizers, which stay on the disk."""
    checkpoint = read_sound(Location.of(path), weights_only)
    device = map_location if isinstance(map_location, str | torch.device) else "cpu"
    loaded: dict[int, Tensor] = {}  # tied weights have several names
    for name, value in checkpoint["state_dict"].items():
        if isinstance(value, StoredTensor):
            if id(value) not in loaded:
                loaded[id(value)] = value.load().to(device)
            checkpoint["state_dict"][name] = loaded[id(value)]
    return checkpoint
