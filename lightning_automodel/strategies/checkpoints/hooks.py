"""What the strategies do when Lightning saves and loads: both kinds of checkpoint, random states, and when to restore.

Lightning can load a checkpoint before or after ``strategy.setup``. It forgets the user's ``weights_only`` in the second
case, so ours loads before, and writes the weights into the model in ``setup``, once all shards lie where they stay::

    load (metadata; tensors stay on disk) -> on_load_checkpoint hooks -> setup -> weights -> optimizers, schedulers
"""

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from lightning_automodel.checkpointing.accumulated_gradients import collect_gradients
from lightning_automodel.checkpointing.files.background import BackgroundSaver
from lightning_automodel.checkpointing.files.folder import SHARDED, contents_of, on_rank_zero, save_folder
from lightning_automodel.checkpointing.files.integrity import verify
from lightning_automodel.checkpointing.files.reading import read_one_edition, refuse_part
from lightning_automodel.checkpointing.files.staging import remove_checkpoint
from lightning_automodel.checkpointing.files.storage import Location
from lightning_automodel.checkpointing.states import (
    clean_name,
    gather_state,
    model_state,
    optimizer_state,
    restore_optimizer,
)
from lightning_automodel.distributed.uneven_shards import stored_state
from lightning_automodel.modules.adapted_bases import names_left_out
from lightning_automodel.strategies.checkpoints.awaited import AwaitedModels
from lightning_automodel.strategies.checkpoints.newest import sound_beside
from lightning_automodel.strategies.data.positions import POSITIONS, collect_positions
from lightning_automodel.strategies.random_state import RANDOM_STATES, collect_random_states

Checkpoint = dict[str, Any]


class Restoration:
    """Defers the restoration of weights to the end of ``setup``; afterwards they are restored at once.

    Attributes:
        path: of the checkpoint, for messages.
        awaited: models that have no weights before.
    """

    def __init__(self) -> None:
        self.path: Location | None = None
        self.awaited = AwaitedModels()
        self._waiting: Callable[[], None] | None = None
        self._is_set_up = False

    def begin(self) -> None:
        """Forgets the restoration of an earlier run of the trainer."""
        self._waiting = None
        self._is_set_up = False
        self.awaited = AwaitedModels()

    def when_set_up(self, restore: Callable[[], None]) -> None:
        """Calls ``restore`` at the end of ``setup``, or now if that has been."""
        self._waiting = restore
        if self._is_set_up:
            self.end_setup()

    def end_setup(self) -> None:
        """Restores what has waited until all parameters lie where they stay.

        Raises:
            ValueError: naming the checkpoint, if it does not fit.
        """
        self._is_set_up = True
        restore, self._waiting = self._waiting, None
        if restore is None:
            return
        try:
            restore()
            self.awaited.check()
        except ValueError as error:
            raise ValueError(f"{self.path} cannot be loaded: {error}") from error


def model_part(model: nn.Module, distributed: bool) -> Checkpoint:
    """Returns the entry ``state_dict`` of a checkpoint: this rank's shards, or all on rank 0 and nothing elsewhere.

    Without the frozen base of adapters, which lies in files, unless the module says ``saves_base``.
    """
    left_out = {clean_name(name) for name in names_left_out(model)}
    return state_part({name: value for name, value in model_state(model).items() if name not in left_out}, distributed)


def state_part(state: Checkpoint, distributed: bool) -> Checkpoint:
    """Returns a tree of tensors as it goes into a checkpoint of either kind. Collective."""
    return state if distributed else _on_zero(gather_state(state))


def optimizer_part(model: nn.Module, optimizer: Optimizer | LightningOptimizer, distributed: bool) -> Checkpoint:
    """Returns one of the entries ``optimizer_states``: by name for a folder, numbered for a plain file."""
    if isinstance(optimizer, LightningOptimizer):
        optimizer = optimizer.optimizer
    return optimizer_state(model, optimizer) if distributed else _on_zero(gather_state(stored_state(optimizer)))


def save_parts(
    checkpoint: Mapping[str, Any], path: Location, data_group: ProcessGroup, background: BackgroundSaver | None
) -> None:
    """Writes a folder, at once or in the background. Collective.

    DTensors that callbacks and users keep in the checkpoint are saved whole.
    """
    contents = contents_of(_complete(checkpoint, data_group))
    if background is not None:
        background.save(contents, path)
    else:
        save_folder(contents, path)


def save_file(
    checkpoint: Mapping[str, Any], path: Location, data_group: ProcessGroup, io: CheckpointIO, options: Any | None
) -> None:
    """Writes a plain file on rank 0, which holds all of it. Collective."""
    checkpoint = _complete(checkpoint, data_group)

    def write() -> None:
        if path.is_folder() and not path.is_local:
            remove_checkpoint(path)
        io.save_checkpoint(dict(checkpoint), str(path), options)

    on_rank_zero(write)


def _complete(checkpoint: Mapping[str, Any], data_group: ProcessGroup) -> Checkpoint:
    others: Checkpoint = {key: value for key, value in checkpoint.items() if key not in SHARDED}
    states = {RANDOM_STATES: collect_random_states(data_group), POSITIONS: collect_positions(checkpoint, data_group)}
    return {**checkpoint, **gather_state(others), **states}


_VERSION = "pytorch-lightning_version"


def load(path: Location, weights_only: bool | None, trainer: "pl.Trainer", is_known_sound: bool = False) -> Checkpoint:
    """Reads a checkpoint of either kind, once it is known to be whole. Collective.

    Raises:
        ValueError: if a file is damaged, or was not saved by a trainer, or for ``fit`` from a checkpoint that holds
            weights only.
    """
    refuse_part(path)
    if path.exists() and not is_known_sound:
        try:
            verify(path)
        except ValueError as error:
            other = sound_beside(path, trainer.strategy.broadcast)
            raise ValueError(
                f"{error}; the newest one beside it that is not damaged is {other}" if other else error
            ) from error
    checkpoint = read_one_edition(path, weights_only)
    if not isinstance(checkpoint, dict) or _VERSION not in checkpoint:
        raise ValueError(
            f"{path} was not saved by a Trainer: it is a {type(checkpoint).__name__} without {_VERSION!r}. Weights "
            "alone are loaded where the model is built: self.model.load_state_dict(torch.load(path)) in __init__ or "
            "configure_model"
        )
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
        restore_optimizer(model, optimizer, state, checkpoint.get("state_dict"))


def gradient_part(model: nn.Module, data_group: ProcessGroup, distributed: bool) -> Checkpoint:
    """Returns the entry ``gradients`` of a checkpoint between two micro-batches of one optimizer step. Collective."""
    return state_part(collect_gradients(model, data_group), distributed)


def _on_zero(state: Any) -> Any:
    return state if dist.get_rank() == 0 else {}
