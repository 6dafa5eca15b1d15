"""What the strategies do when Lightning saves and loads: both kinds of checkpoint, random states, and when to restore.

Lightning can load a checkpoint before or after ``strategy.setup``. It forgets the user's ``weights_only`` in the second
case, so ours loads before, and writes the weights into the model in ``setup``, once all shards lie where they stay::

    load (metadata; tensors stay on disk) -> on_load_checkpoint hooks -> setup -> weights -> optimizers, schedulers
"""

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from lightning_automodel.checkpointing.folder import on_rank_zero, read_checkpoint, remove_checkpoint, save_folder
from lightning_automodel.checkpointing.states import gather_state, model_state, optimizer_state, restore_optimizer

RANDOM_STATES = "random_states"
Checkpoint = dict[str, Any]


class Restoration:
    """Weights that wait for the end of ``setup``; afterwards they are restored at once."""

    def __init__(self) -> None:
        self._waiting: Callable[[], None] | None = None
        self._is_set_up = False

    def begin(self) -> None:
        """A run of the trainer begins."""
        self._waiting = None
        self._is_set_up = False

    def when_set_up(self, restore: Callable[[], None]) -> None:
        """Calls ``restore`` at the end of ``setup``, or now if that has been."""
        if self._is_set_up:
            restore()
        else:
            self._waiting = restore

    def end_setup(self) -> None:
        """All parameters lie where they stay."""
        self._is_set_up = True
        if self._waiting is not None:
            self._waiting()
            self._waiting = None


def model_part(model: nn.Module, distributed: bool) -> Checkpoint:
    """The entry ``state_dict`` of a checkpoint: this rank's shards, or all on rank 0 and nothing elsewhere."""
    state = model_state(model)
    return state if distributed else _on_zero(gather_state(state))


def optimizer_part(model: nn.Module, optimizer: Optimizer | LightningOptimizer, distributed: bool) -> Checkpoint:
    """One of the entries ``optimizer_states``: by name for a folder, as ``optimizer.state_dict()`` for a plain file."""
    if isinstance(optimizer, LightningOptimizer):
        optimizer = optimizer.optimizer
    return optimizer_state(model, optimizer) if distributed else _on_zero(gather_state(optimizer.state_dict()))


def save(
    checkpoint: Mapping[str, Any],
    path: Path,
    data_group: ProcessGroup,
    io: CheckpointIO | None,
    storage_options: Any | None,
) -> None:
    """Writes a folder, or with ``io`` a plain file. Collective.

    DTensors that callbacks and users keep in the checkpoint are saved whole.

    Raises:
        ValueError: if ``storage_options`` come with a folder.
    """
    others = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
    checkpoint = {**checkpoint, **gather_state(others), RANDOM_STATES: collect_random_states(data_group)}
    if io is None:
        if storage_options is not None:
            raise ValueError(
                f"storage_options={storage_options!r} is an option of a checkpoint in one file; use "
                "FSDP2TPStrategy(save_distributed_checkpoint=False)"
            )
        save_folder(checkpoint, path)
        return
    if path.is_dir():
        on_rank_zero(lambda: remove_checkpoint(path))
    on_rank_zero(lambda: io.save_checkpoint(checkpoint, path, storage_options))


def remove(path: Path, io: CheckpointIO) -> None:
    """Deletes a checkpoint of either kind. On rank 0 only."""
    if path.is_dir():
        remove_checkpoint(path)
    else:
        io.remove_checkpoint(path)


def load(path: Path, weights_only: bool | None, trainer: "pl.Trainer") -> Checkpoint:
    """Reads a checkpoint of either kind; see :func:`~lightning_automodel.checkpointing.folder.read_checkpoint`.

    Raises:
        ValueError: for ``fit`` from a checkpoint that holds weights only.
    """
    checkpoint = read_checkpoint(path, weights_only)
    if trainer.state.fn == TrainerFn.FITTING and "optimizer_states" not in checkpoint:
        raise ValueError(
            f"{path} holds weights only (it was saved with save_weights_only=True), so fit cannot resume from it; call "
            "trainer.validate(module, ckpt_path=...) to load the weights, then trainer.fit(module) to start from them"
        )
    return checkpoint


def restore_optimizers(model: nn.Module, optimizers: list[Optimizer], checkpoint: Mapping[str, Any]) -> None:
    """Gives the optimizers their states. Collective.

    Raises:
        ValueError: if the checkpoint is of another number of optimizers.
    """
    states = checkpoint["optimizer_states"]
    if len(states) != len(optimizers):
        raise ValueError(
            f"the checkpoint holds the states of {len(states)} optimizers, and configure_optimizers returned "
            f"{len(optimizers)}"
        )
    for optimizer, state in zip(optimizers, states, strict=True):
        restore_optimizer(model, optimizer, state)


def _on_zero(state: Any) -> Any:
    return state if dist.get_rank() == 0 else {}


# ---- random states ---------------------------------------------------------------------------------------------------


def collect_random_states(data_group: ProcessGroup) -> list[Checkpoint]:
    """The random state of each data rank; ranks that see the same samples share one. Collective over the group."""
    states: list[Checkpoint] = [{}] * data_group.size()
    dist.all_gather_object(states, _random_state(), group=data_group)
    return states


def restore_random_state(checkpoint: Mapping[str, Any], data_rank: int) -> None:
    """Sets the state that this rank of the data group had; ranks that were not there when it was saved keep theirs."""
    states = checkpoint.get(RANDOM_STATES, [])
    if data_rank >= len(states):
        return
    state = states[data_rank]
    random.setstate(state["python"])
    name, keys, *others = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *others))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _random_state() -> Checkpoint:
    """As plain containers and tensors, which load with ``weights_only=True``."""
    numpy: Any = np.random.get_state()
    name, keys, *others = numpy
    return {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *others),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }
