"""Finds what is to be read and is not there, before processes are started to read it."""

import zipfile
from pathlib import Path
from typing import Any

from lightning_automodel.finetuning.mixture import sources_of

_NAMES = ("last", "best", "hpc", "registry")  # of checkpoints, which Lightning looks for
_PICKLE = b"\x80"
"""How files of torch's format from before version 1.6 begin."""


def refuse_missing(data: Any, checkpoint: Any) -> None:
    """Looks for the files of a data module and for the checkpoint to go on from.

    Args:
        data: a data module; if it has ``files`` (by split), these are looked at.
        checkpoint: path, URL, one of Lightning's names, or ``None``.

    Raises:
        ValueError: naming what is not there.
    """
    for files in getattr(data, "files", {}).values():
        if files is not None:
            sources_of(files)
    if checkpoint is None or "://" in str(checkpoint) or str(checkpoint).partition(":")[0] in _NAMES:
        return
    if not Path(checkpoint).exists():
        raise ValueError(f"--ckpt_path={checkpoint}: there is no checkpoint at {Path(checkpoint).absolute()}")


def refuse_other_file(checkpoint: Any) -> None:
    """Looks at the kind of a local file that a run is to go on from.

    Raises:
        ValueError: if it is not what ``torch.save`` writes, or not all of it.
    """
    path = Path(checkpoint)
    if path.is_file() and not zipfile.is_zipfile(path) and not _begins_with(path, _PICKLE):
        raise ValueError(
            f"--ckpt_path={checkpoint} is no checkpoint, or a part of one (torch.save writes another kind of file); "
            "give a folder or a file that ModelCheckpoint or trainer.save_checkpoint wrote"
        )


def _begins_with(path: Path, start: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(start)) == start
