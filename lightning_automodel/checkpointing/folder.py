"""The checkpoint folder: each rank writes and reads its own parts of the tensors, in any layout, through torch's DCP.

::

    NAME.ckpt/
        __0_0.distcp, ...   parts of tensors, each written once, by a rank that holds it
        .metadata           which part lies in which file (torch's own)
        meta.pt             all the rest; written last: a folder without it is no checkpoint

A folder is written as ``.incomplete/NAME.ckpt`` and renamed when it is complete. Files and entries are those of
Lightning's ``ModelParallelStrategy``; checkpoints of either can be loaded by ours.
"""

import io
import os
import pickle
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_automodel.checkpointing.dcp import list_tensors, write_tensors

METADATA = "meta.pt"
_INCOMPLETE = ".incomplete"
_ALIASES = "lightning_automodel_aliases"
Checkpoint = dict[str, Any]


# ---- saving ----------------------------------------------------------------------------------------------------------


def save_folder(checkpoint: Mapping[str, Any], path: Path) -> None:
    """Writes ``checkpoint`` to the folder ``path``. Collective: every process of the run calls it.

    Tensors in ``state_dict`` and ``optimizer_states`` are written by the ranks that hold them, all else by rank 0. What
    was at ``path`` before stays until the new folder is complete.
    """
    tensors, rest = _split(checkpoint)
    metadata = on_rank_zero(lambda: _serialize(rest))
    staging = path.parent / _INCOMPLETE / path.name
    on_rank_zero(lambda: _make_empty(staging))
    write_tensors(tensors, staging)
    on_rank_zero(lambda: _complete(staging, path, metadata or b""))


def on_rank_zero(function: Callable[[], Any]) -> Any:
    """Calls ``function`` on rank 0 and returns its result there; an error is raised on every rank. Collective."""
    result, error = None, None
    if dist.get_rank() == 0:
        try:
            result = function()
        except Exception as caught:
            error = caught
    messages = [None if error is None else repr(error)]
    dist.broadcast_object_list(messages, src=0)
    if error is not None:
        raise error
    if messages[0] is not None:
        raise RuntimeError(f"rank 0 failed: {messages[0]}")
    return result


def remove_checkpoint(path: Path) -> None:
    """Deletes a checkpoint so that no part of it is left under its name, whenever the process ends."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        _delete_staging(_set_aside(path))


def _set_aside(path: Path) -> Path:
    aside = path.parent / _INCOMPLETE / f"{path.name}.removed"
    _make_empty(aside)
    path.rename(aside / path.name)
    return aside


def _split(checkpoint: Mapping[str, Any]) -> tuple[Checkpoint, Checkpoint]:
    """What DCP writes, and what goes into the metadata. A tensor with several names is written under the first."""
    rest = dict(checkpoint)
    first: dict[int, str] = {}
    state = checkpoint.get("state_dict", {})
    aliases = {name: first[id(t)] for name, t in state.items() if first.setdefault(id(t), name) != name}
    tensors, rest["state_dict"] = _take_tensors({name: t for name, t in state.items() if name not in aliases})
    result = {"state_dict": tensors}
    rest[_ALIASES] = aliases
    if "optimizer_states" in checkpoint:
        split = [_take_tensors(optimizer) for optimizer in checkpoint["optimizer_states"]]
        rest["optimizer_states"] = [others for _, others in split]
        result.update({f"optimizer_{i}": tensors for i, (tensors, _) in enumerate(split)})
    return result, rest


def _take_tensors(tree: Mapping[str, Any]) -> tuple[Checkpoint, Checkpoint]:
    tensors: Checkpoint = {}
    rest: Checkpoint = {}
    for key, value in tree.items():
        if isinstance(value, Tensor):
            tensors[key] = value
        elif isinstance(value, Mapping):
            tensors[key], rest[key] = _take_tensors(value)
        else:
            rest[key] = value
    return tensors, rest


def _serialize(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _complete(staging: Path, path: Path, metadata: bytes) -> None:
    with (staging / METADATA).open("wb") as file:
        file.write(metadata)
        file.flush()
        os.fsync(file.fileno())
    aside = _set_aside(path) if path.exists() or path.is_symlink() else staging
    staging.rename(path)
    _delete_staging(aside)


def _make_empty(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def _delete_staging(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    if not any(folder.parent.iterdir()):
        folder.parent.rmdir()


# ---- loading ---------------------------------------------------------------------------------------------------------


def read_checkpoint(path: Path, weights_only: bool | None = None) -> Checkpoint:
    """Reads a checkpoint of either kind, but not its tensors: ``dcp.fetch`` does, for each rank's part.

    Args:
        path: a folder that :func:`save_folder` wrote, or a plain checkpoint file.
        weights_only: refuse pickled objects other than tensors and plain containers (``None``: torch's default, yes).

    Returns:
        the checkpoint, with a ``StoredTensor`` (folder) or a memory-mapped tensor (file) in place of each tensor.

    Raises:
        FileNotFoundError: if nothing is there.
        ValueError: if it is not a complete checkpoint, or needs ``weights_only=False``.
    """
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint at {path}")
    try:
        return _read_folder(path, weights_only) if path.is_dir() else _load(path, weights_only, mmap=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} holds objects that weights_only=True refuses, since loading them can run code. If you trust where "
            "the checkpoint comes from, load it with trainer.fit(..., ckpt_path=..., weights_only=False) (validate, "
            f"test and predict alike). What was refused: {error}"
        ) from error


def _read_folder(path: Path, weights_only: bool | None) -> Checkpoint:
    if not (path / METADATA).is_file():
        raise ValueError(
            f"{path} is not a checkpoint: it has no {METADATA}, which is written when all else is complete"
        )
    checkpoint = _load(path / METADATA, weights_only)
    stored = list_tensors(path, weights_only)
    state = checkpoint.setdefault("state_dict", {})
    _merge(state, stored.pop("state_dict", {}))
    state.update({alias: state[name] for alias, name in checkpoint.pop(_ALIASES, {}).items()})
    if stored:
        states = checkpoint.setdefault("optimizer_states", [{} for _ in stored])
        for i, optimizer in enumerate(states):
            _merge(optimizer, stored.get(f"optimizer_{i}", {}))
    return checkpoint


def _load(path: Path, weights_only: bool | None, mmap: bool = False) -> Checkpoint:
    return torch.load(path, map_location="cpu", weights_only=weights_only, mmap=mmap)


def _merge(target: Checkpoint, source: Checkpoint) -> None:
    for key, value in source.items():
        if isinstance(value, dict) and isinstance(target.get(key), dict):
            _merge(target[key], value)
        else:
            target[key] = value
