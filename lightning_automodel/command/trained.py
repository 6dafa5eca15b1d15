"""Opens what was trained: a checkpoint of any layout, an export, or a name on the hub.

A checkpoint is exported first, to a folder that goes when the command ends, by one process of each node::

    checkpoint -> export (whole tensors, adapters merged) -> from_pretrained, of which each rank reads its slices
"""

import os
import platform
import shutil
import time
from collections.abc import Generator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import lightning as L
import torch

from lightning_automodel import FSDP2TPStrategy
from lightning_automodel.checkpointing.conversion import export
from lightning_automodel.checkpointing.files.folder import METADATA
from lightning_automodel.checkpointing.files.storage import Location
from lightning_automodel.finetuning.data import default_cache_dir

_FOLDER = "LIGHTNING_AUTOMODEL_EXPORT"  # which the processes that this one starts inherit
_LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID")
_SPARE = 0.8  # share of a device's memory for weights
_WAIT = 0.2  # seconds
_LONGEST = 3600.0  # seconds that an export may take
_STARTED, _APART = time.time(), 60.0  # processes of a run start so many seconds apart at most


@contextmanager
def opened(model: str, *, trusts: bool = False) -> Generator[str, None, None]:
    """Gives a directory or name that ``from_pretrained`` reads, within this context.

    Args:
        model: that, or a checkpoint: a path, or a URL.
        trusts: whether code that comes with the model may run.

    Raises:
        ValueError: if it is a checkpoint that cannot be exported, on all processes of the node.
    """
    if not _is_checkpoint(Location.of(model)):
        yield model
        return
    folder = Path(os.environ.setdefault(_FOLDER, str(default_cache_dir() / "exports" / _name_of_run(model))))
    first = all(os.environ.get(name, "0") == "0" for name in _LOCAL_RANKS)
    try:
        if first:
            _export(model, folder, trusts)
        else:
            _await_export(model, folder)
        yield str(folder)
    finally:
        if first:
            shutil.rmtree(folder, ignore_errors=True)
            del os.environ[_FOLDER]


def _name_of_run(checkpoint: str) -> str:
    """Name what the processes of one run on this node share, and no other run at the same time: within one job of
    SLURM, or beside a port that is set for all, each command that one process starts is a run of its own.
    """
    known, digest = os.environ, sha256(os.path.abspath(checkpoint).encode()).hexdigest()[:12]
    if "LOCAL_RANK" in known and "MASTER_PORT" in known:
        run = known["MASTER_PORT"]
    elif "SLURM_STEP_ID" in known and known.get("SLURM_STEP_NUM_TASKS") != "1":
        run = f"{known.get('SLURM_JOB_ID', '')}.{known['SLURM_STEP_ID']}"
    else:
        run = f"process-{os.getpid()}"
    return f"{platform.node()}-{run}-{digest}"  # the folder may be on a disk that nodes share


def _is_checkpoint(path: Location) -> bool:
    """Tell whether a checkpoint of ours or of Lightning lies at ``path``."""
    return (path / METADATA).is_file() or path.is_file()


def _export(checkpoint: str, folder: Path, trusts: bool) -> None:
    unfinished, failure = (folder.with_name(f"{folder.name}.{end}") for end in ("part", "failed"))
    failure.unlink(missing_ok=True)
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        export(checkpoint, str(unfinished), merge=True, trust_remote_code=trusts)
        unfinished.rename(folder)
    except Exception as error:
        failure.parent.mkdir(parents=True, exist_ok=True)
        failure.write_text(str(error))
        raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _await_export(checkpoint: str, folder: Path) -> None:
    """Wait for the first process of this node, and fail as it fails."""
    failure, end = folder.with_name(f"{folder.name}.failed"), time.monotonic() + _LONGEST
    while not folder.is_dir():
        if failure.is_file() and failure.stat().st_mtime > _STARTED - _APART:
            raise ValueError(failure.read_text())
        if time.monotonic() > end:
            raise ValueError(
                f"{checkpoint} was not exported within {_LONGEST / 60:.0f} minutes by the first process of this node; "
                "see what it says, or export it once (lightning-automodel export) and give that directory"
            )
        time.sleep(_WAIT)


def make_trainer(model: str, tp: int | None, devices: int | None, precision: str | None) -> L.Trainer:
    """Make a trainer that evaluates ``model``, as many ranks to a replica as its weights need.

    Args:
        model: directory or name.
        tp: ranks that share the matrices; ``None``: what their memory asks for.
        devices: processes; ``None``: one replica.
        precision: of the trainer; ``None``: bfloat16 on CUDA, else float32.
    """
    cuda = torch.cuda.is_available()
    if tp is None:
        memory = torch.cuda.get_device_properties(0).total_memory if cuda else None
        tp = devices_needed(bytes_of_weights(Path(model)), memory, torch.cuda.device_count())
    return L.Trainer(
        strategy=FSDP2TPStrategy(tp=tp),
        devices=devices or tp,
        precision=precision or ("bf16-true" if cuda else "32-true"),  # type: ignore[arg-type]
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def bytes_of_weights(directory: Path) -> int:
    """Sum the sizes of a directory's files of weights; 0 for a name on the hub."""
    return sum(path.stat().st_size for path in directory.glob("*.safetensors")) if directory.is_dir() else 0


def devices_needed(weights: int, memory: int | None, count: int) -> int:
    """Choose among how many devices, a power of two, a model is split.

    Args:
        weights: bytes.
        memory: bytes of one device; ``None``: the host's, which is not divided.
        count: of devices.
    """
    tp = 1
    while memory is not None and weights > _SPARE * memory * tp and 2 * tp <= count:
        tp *= 2
    return tp
