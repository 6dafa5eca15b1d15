"""The checkpoint folder: each rank writes its own parts of the tensors, for any layout, through torch's DCP.

::

    NAME.ckpt/
        __0_0.distcp, ...   parts of tensors, each written once, by a rank that holds it
        .metadata           which part lies in which file (torch's own)
        checksums.json      size and CRC-32 of every other file
        meta.pt             all the rest; a folder without it is no checkpoint

The folder is written elsewhere and gets its name when it is complete (see ``staging``). Files and entries are those of
Lightning's ``ModelParallelStrategy``; checkpoints of either can be loaded by ours.
"""

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_automodel.checkpointing.files.dcp import Held, SameAs, write_tensors
from lightning_automodel.checkpointing.files.integrity import CHECKSUMS, Sums, sum_of, to_json
from lightning_automodel.checkpointing.files.staging import Staging
from lightning_automodel.checkpointing.files.storage import Location

METADATA = "meta.pt"
ALIASES = "lightning_automodel_aliases"
GRADIENTS = "gradients"
"""Entry of a checkpoint that was saved between the micro-batches of an optimizer step."""
CURRENT = "current_model_state"
"""Entry of a checkpoint of Lightning's ``WeightAveraging``, whose ``state_dict`` is the average."""
TREES = (GRADIENTS, CURRENT)
SHARDED = ("state_dict", "optimizer_states", *TREES)
"""Entries whose tensors are written in parts."""
OPTIMIZER = "optimizer_"
"""What the name of an optimizer's branch begins with, before its number."""
Checkpoint = dict[str, Any]


@dataclass(frozen=True)
class Contents:
    """What this rank writes of one checkpoint, shards and the rest apart.

    Attributes:
        tensors: tree of ``Held``.
        metadata: content of ``meta.pt``; empty on ranks other than 0.
    """

    tensors: Checkpoint
    metadata: bytes


def is_of_optimizer(name: str) -> bool:
    """Tells whether an entry of ``Contents.tensors`` holds the states of an optimizer."""
    return name.startswith(OPTIMIZER)


def contents_of(checkpoint: Mapping[str, Any]) -> Contents:
    """Splits a checkpoint: tensors in the entries ``SHARDED`` are written by ranks that hold them, all else by rank 0.
    Nothing is copied but what is not a tensor. Collective.
    """
    tensors, rest = _split(checkpoint)
    metadata = on_rank_zero(lambda: _serialize(rest))
    return Contents(tensors, metadata or b"")


def save_folder(contents: Contents, path: Location, group: ProcessGroup | None = None) -> None:
    """Writes the folder ``path``. Collective over ``group`` (default: all), which every process of the run is in.

    What was at ``path`` before stays until the new folder is complete.
    """
    staging = Staging(path)
    try:
        on_rank_zero(staging.begin, group)
        sums = write_tensors(contents.tensors, staging.folder, group)
        everything = _collect(sums, group)
        on_rank_zero(lambda: _complete(staging, contents.metadata, everything), group)
    finally:
        staging.abandon()


def on_rank_zero(function: Callable[[], Any], group: ProcessGroup | None = None) -> Any:
    """Calls ``function`` on rank 0 and returns its result there; an error is raised on every rank. Collective."""
    result, error = None, None
    if dist.get_rank() == 0:
        try:
            result = function()
        except Exception as caught:
            error = caught
    messages = [None if error is None else f"{type(error).__name__}: {error}"]
    dist.broadcast_object_list(messages, src=0, group=group)
    if error is not None:
        raise error
    if messages[0] is not None:
        raise RuntimeError(f"rank 0 failed: {messages[0]}")
    return result


def _collect(sums: Sums, group: ProcessGroup | None) -> Sums:
    parts: list[Sums] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(parts, sums, group=group)
    return {name: value for part in parts for name, value in part.items()}


def _complete(staging: Staging, metadata: bytes, sums: Sums) -> None:
    (staging.folder / CHECKSUMS).write(to_json({**sums, METADATA: sum_of(metadata)}))
    (staging.folder / METADATA).write(metadata)
    staging.publish(last=METADATA)


def _split(checkpoint: Mapping[str, Any]) -> tuple[Checkpoint, Checkpoint]:
    """Splits a tree into what DCP writes and what goes into the metadata."""
    rest = dict(checkpoint)
    first: dict[int, str] = {}
    state = checkpoint.get("state_dict", {})
    aliases = {name: first[id(t)] for name, t in state.items() if first.setdefault(id(t), name) != name}
    tensors, rest["state_dict"] = _take_tensors({name: t for name, t in state.items() if name not in aliases})
    result = {"state_dict": {**tensors, **{alias: SameAs(f"state_dict.{name}") for alias, name in aliases.items()}}}
    rest[ALIASES] = aliases
    if "optimizer_states" in checkpoint:
        split = [_take_tensors(optimizer) for optimizer in checkpoint["optimizer_states"]]
        rest["optimizer_states"] = [others for _, others in split]
        result.update({f"{OPTIMIZER}{i}": _with_groups(*parts) for i, parts in enumerate(split)})
    for entry in TREES:
        if entry in checkpoint:
            result[entry], rest[entry] = _take_tensors(checkpoint[entry])
    return result, rest


def _with_groups(tensors: Checkpoint, rest: Checkpoint) -> Checkpoint:
    """Add the hyperparameters, which torch's tools and Lightning's strategy look for beside the tensors."""
    return {**tensors, "param_groups": rest["param_groups"]} if "param_groups" in rest else tensors


def _take_tensors(tree: Mapping[str, Any], prefix: str = "") -> tuple[Checkpoint, Checkpoint]:
    tensors: Checkpoint = {}
    rest: Checkpoint = {}
    for key, value in tree.items():
        if isinstance(value, Tensor):
            tensors[key] = Held.of(value, f"{prefix}{key}")
        elif isinstance(value, Mapping):
            tensors[key], rest[key] = _take_tensors(value, f"{prefix}{key}.")
        else:
            rest[key] = value
    return tensors, rest


def _serialize(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
