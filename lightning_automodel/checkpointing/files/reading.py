"""Reads checkpoints of either kind, folder or plain file, without their tensors: each rank fetches its part later."""

import pickle
import zipfile
from typing import Any

import torch
import torch.distributed as dist

from lightning_automodel.checkpointing.files.dcp import list_tensors
from lightning_automodel.checkpointing.files.folder import ALIASES, METADATA, OPTIMIZER, TREES, Checkpoint
from lightning_automodel.checkpointing.files.integrity import check_edition, edition_of, replaced, verify
from lightning_automodel.checkpointing.files.storage import Location

_EXPORTS = {
    "adapter_config.json": "; it is an exported adapter, which trains on as CausalLM(peft=...) or model=..., and is "
    "merged by `lightning-automodel export CHECKPOINT OUT --merge=true`, or by merge_and_unload() of peft",
    "config.json": "; it is an exported model, which from_pretrained reads: a run begins with it as its model",
}


def read_checkpoint(path: Location, weights_only: bool | None = None) -> Checkpoint:
    """Reads a checkpoint of either kind, but not its tensors: ``dcp.fetch`` does, for each rank's part.

    Args:
        path: a folder that :func:`~lightning_automodel.checkpointing.files.folder.save_folder` wrote, or a plain file.
        weights_only: refuse pickled objects other than tensors and plain containers (``None``: torch's default, yes).

    Returns:
        the checkpoint, with a ``StoredTensor`` (folder) or a memory-mapped tensor (local file) in place of each tensor.

    Raises:
        FileNotFoundError: if nothing is there.
        ValueError: if it is not a complete checkpoint, or needs ``weights_only=False``.
    """
    if not path.exists():
        raise FileNotFoundError(f"Checkpoint file not found: there is no checkpoint at {path}")
    try:
        return _read_folder(path, weights_only) if path.is_folder() else _load(path, weights_only)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} holds objects that weights_only=True refuses, since loading them can run code. If you trust where "
            "the checkpoint comes from, load it with trainer.fit(..., ckpt_path=..., weights_only=False) (validate, "
            f"test, predict and load_from_checkpoint alike). What was refused: {error}"
        ) from error


def read_sound(path: Location, weights_only: bool | None = None) -> Checkpoint:
    """Reads a checkpoint as :func:`read_checkpoint` does, once all of it is known to be what was written.

    Raises:
        ValueError: naming a file that is damaged, or a checkpoint that another process has replaced meanwhile.
    """
    edition = edition_of(path)
    if path.exists():
        verify(path)
    checkpoint = read_checkpoint(path, weights_only)
    check_edition(path, edition)
    return checkpoint


def read_one_edition(path: Location, weights_only: bool | None) -> Checkpoint:
    """Read a checkpoint, all ranks the same: another run may save under its name meanwhile. Collective.

    Raises:
        ValueError: on every rank, if another process has replaced it, or a rank could not read it.
    """
    edition, checkpoint = edition_of(path), Checkpoint()
    error: Exception | None = None
    try:
        checkpoint = read_checkpoint(path, weights_only)
    except Exception as caught:
        error = caught
    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, (edition, edition_of(path), error and str(error)))
    if len({one for *both, _ in seen for one in both}) > 1:
        raise ValueError(replaced(path)) from error
    if error is not None:
        raise error
    if failed := [f"rank {rank}: {what}" for rank, (*_, what) in enumerate(seen) if what is not None]:
        raise ValueError(f"{path} could not be read by other ranks. {failed[0]}")
    return checkpoint


def refuse_part(path: Location) -> None:
    """Check that ``path`` is not a file within a checkpoint folder.

    Raises:
        ValueError: naming the folder.
    """
    if path.is_file() and (path.parent / METADATA).is_file():
        raise ValueError(f"{path} is a part of the checkpoint {path.parent}; give the folder")


def _read_folder(path: Location, weights_only: bool | None) -> Checkpoint:
    if not (path / METADATA).is_file():
        inside = [name for name in path.names() if (path / name / METADATA).is_file()]
        exported = next((said for file, said in _EXPORTS.items() if (path / file).is_file()), "")
        raise ValueError(
            f"{path} is not a checkpoint: it has no {METADATA}, which is written when all else is complete"
            + (f"; it holds checkpoints, give one of them: {', '.join(inside)}" if inside else exported)
        )
    checkpoint = _load(path / METADATA, weights_only)
    known = {f"{OPTIMIZER}{i}" for i in range(len(checkpoint.get("optimizer_states", [])))}
    stored = list_tensors(path, weights_only, known)
    state = checkpoint.setdefault("state_dict", {})
    _merge(state, stored.pop("state_dict", {}))
    state.update({alias: state[name] for alias, name in checkpoint.pop(ALIASES, {}).items()})
    for entry in TREES:
        if entry in stored:
            _merge(checkpoint[entry], stored.pop(entry))
    if stored:
        states = checkpoint.setdefault("optimizer_states", [{} for _ in stored])
        for i, optimizer in enumerate(states):
            _merge(optimizer, stored.get(f"{OPTIMIZER}{i}", {}))
    return checkpoint


def _load(path: Location, weights_only: bool | None) -> Checkpoint:
    if path.is_local:
        if not zipfile.is_zipfile(path.path):
            raise ValueError(f"{path} is no checkpoint: torch.save (since 1.6) writes another kind of file")
        return torch.load(path.path, map_location="cpu", weights_only=weights_only, mmap=path.name != METADATA)
    with path.open("rb") as file:
        return torch.load(file, map_location="cpu", weights_only=weights_only)


def _merge(target: Checkpoint, source: Checkpoint) -> None:
    for key, value in source.items():
        if isinstance(value, dict) and isinstance(target.get(key), dict):
            _merge(target[key], value)
        else:
            target[key] = value
