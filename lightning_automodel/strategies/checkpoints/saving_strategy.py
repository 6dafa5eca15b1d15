"""The hooks of every strategy by which Lightning saves and loads: both kinds of checkpoint, and what "last" means."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel
from typing_extensions import override

from lightning_automodel._compat.lightning.early_loaders import begin_passes_as_ever, begin_passes_in_run
from lightning_automodel._compat.lightning.evaluation_loops import around_validation_start
from lightning_automodel._compat.lightning.progress import (
    before_each_step,
    before_first_batch,
    forget_first_batch,
    is_within_batch,
    loops_before_step,
    training_loader,
)
from lightning_automodel._compat.lightning.trainer import checkpoint_path_of, is_accumulating
from lightning_automodel._compat.torch.tensors import version_of
from lightning_automodel.checkpointing.accumulated_gradients import read_gradients
from lightning_automodel.checkpointing.files.background import BackgroundSaver
from lightning_automodel.checkpointing.files.folder import GRADIENTS
from lightning_automodel.checkpointing.files.staging import remove_checkpoint
from lightning_automodel.checkpointing.files.storage import Location
from lightning_automodel.checkpointing.hugging_face.description import DESCRIPTIONS, describe_models
from lightning_automodel.checkpointing.names import held_models
from lightning_automodel.checkpointing.states import clean_name, restore_model
from lightning_automodel.distributed.barrier import meet
from lightning_automodel.distributed.logs import logger
from lightning_automodel.distributed.shards import local_tensor
from lightning_automodel.modules.adapted_bases import forget_files_below, names_left_out_of
from lightning_automodel.parallel.guards.replica_check import warn_of_buffers_apart
from lightning_automodel.strategies.checkpoints import hooks as checkpoints
from lightning_automodel.strategies.checkpoints.bases import FrozenBases
from lightning_automodel.strategies.checkpoints.newest import Replacement
from lightning_automodel.strategies.checkpoints.own_loading import load_through
from lightning_automodel.strategies.checkpoints.plateaus import MONITORED, go_on_monitoring, monitored_numbers
from lightning_automodel.strategies.checkpoints.trained import TRAINED, Trained
from lightning_automodel.strategies.data.positions import POSITIONS, choose_position
from lightning_automodel.strategies.data.seen_samples import SEEN, SeenSamples, warn_of_loaders_ahead
from lightning_automodel.strategies.data.stateful import had_state
from lightning_automodel.strategies.mesh import OnMesh
from lightning_automodel.strategies.metric_states import combined_states, leave_to_first_rank
from lightning_automodel.strategies.random_state import RANDOM_NUMBERS, RANDOM_STATES, restore_random_state

OWN_ENTRIES = (RANDOM_STATES, RANDOM_NUMBERS, POSITIONS, SEEN, DESCRIPTIONS, GRADIENTS, TRAINED, MONITORED)
"""What a checkpoint of ours holds beside Lightning's."""

_ON_ALL_RANKS = (
    "every rank writes or sends its part of a checkpoint, so call trainer.save_checkpoint on all of them, without "
    "`if trainer.is_global_zero` around it"
)
_BEHIND_STEP = (
    "the optimizer has taken its step and the batch is not through, so that {path} would have that step taken twice: "
    "its weights are behind it, and a run that goes on does the batch anew"
)


class SavingStrategy(OnMesh):
    """Mixin: a strategy that saves and loads checkpoints, whole or sharded, at once or in the background."""

    _save_distributed_checkpoint: bool
    _async_save: bool = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._background = BackgroundSaver()
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._unstepped: set[int] = set()  # ids of optimizers without a step since the last backward pass
        self._used: dict[int, list[tuple[int, int]]] = {}  # by id of optimizer: gradients of its last step
        self._stepped_in = -1  # which batch of the run took the last step
        self._own: dict[str, Any] = {}
        self._restoration = checkpoints.Restoration()
        self._replacement = Replacement()
        self._seen = SeenSamples()
        self._bases = FrozenBases()
        self._what_trains = Trained()

    def choose_checkpoints(self, distributed: bool, in_background: bool, skips_damaged: bool) -> None:
        """Choose folders or plain files, whether training goes on while a folder is written, and what "last" means.

        Raises:
            ValueError: for files in the background.
        """
        self._save_distributed_checkpoint, self._async_save = distributed, in_background
        self._skips_damaged = skips_damaged
        if in_background and not distributed:
            raise ValueError(
                "async_save=True writes a checkpoint folder; with save_distributed_checkpoint=False use "
                "Trainer(plugins=AsyncCheckpointIO())"
            )

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return False  # see hooks.py

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return True

    # ---- saving ------------------------------------------------------------------------------------------------------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if not self._has_begun:
            return super().lightning_module_state_dict()
        self.check_all_end()
        if self._trainer.state.status != TrainerStatus.INTERRUPTED:
            meet("save_checkpoint", "", _ON_ALL_RANKS)
        self._bases.check_unmerged(self._module)
        self._bases.let_changes_be_saved(self._module)
        with combined_states(self._module):
            return checkpoints.model_part(self._module, self._save_distributed_checkpoint)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return checkpoints.optimizer_part(self._module, optimizer, self._save_distributed_checkpoint)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        if not self._has_begun:
            if self.is_global_zero:
                self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options)
            return
        path = Location.of(self.broadcast(filepath))
        if self._trainer.state.status != TrainerStatus.INTERRUPTED:  # an error may leave a step half done
            self.check_replicas(self._module)
            warn_of_buffers_apart(self._module, self.data_group)
        is_done_anew = self._module.automatic_optimization and self.does_step_anew()
        if is_done_anew and self._stepped_in == self._trainer.fit_loop.epoch_loop.total_batch_idx:
            self._tell_of_step(path)
        added = {
            DESCRIPTIONS: describe_models(self._module),
            RANDOM_NUMBERS: self._draws.state(),
            SEEN: self._seen.describe(self._trainer, training_loader(self._trainer), self.data_size),
            **monitored_numbers(self._trainer),
            **self._trained_entry(),
        }
        checkpoint = {**checkpoint, **added}
        if is_done_anew and "loops" in checkpoint:
            warn_of_loaders_ahead(training_loader(self._trainer))
            checkpoint["loops"] = loops_before_step(self._trainer, checkpoint["loops"])
        elif "optimizer_states" in checkpoint and self.is_within_step():
            checkpoint[GRADIENTS] = self.accumulated_gradients()
        if not self._save_distributed_checkpoint:
            checkpoints.save_file(checkpoint, path, self.data_group, self.checkpoint_io, storage_options)
            return
        if storage_options is not None:
            raise ValueError(
                f"storage_options={storage_options!r} is an option of a checkpoint in one file; use "
                f"{type(self).__name__}(save_distributed_checkpoint=False)"
            )
        checkpoints.save_parts(checkpoint, path, self.data_group, self._background if self._async_save else None)

    def _tell_of_step(self, path: Location) -> None:
        told = _BEHIND_STEP.format(path=path)
        if self._trainer.state.status != TrainerStatus.INTERRUPTED:
            raise ValueError(f"{told}. Save in on_train_batch_end, or before the step")
        logger.error("%s. Go on from an earlier checkpoint", told)

    def _trained_entry(self) -> dict[str, Any]:
        if TRAINED in self._own:  # hooks before training save, before it is put in place
            return {TRAINED: self._own[TRAINED]}
        trainer = self._trainer
        evaluates = trainer.validating and trainer.state.fn == TrainerFn.FITTING
        return self._what_trains.entry(is_done_anew=self.does_step_anew(), evaluates=evaluates)

    def is_within_step(self) -> bool:
        """Tells whether gradients wait for a step, between its micro-batches. Collective with manual optimization."""
        if self._module.automatic_optimization:
            return is_accumulating(self._trainer)
        return self.reduce_boolean_decision(bool(self._unstepped), all=False)

    def does_step_anew(self) -> bool:
        """Tells whether who goes on from a checkpoint of now does the present step (by hand: the batch) anew."""
        return is_within_batch(self._trainer)

    def note_backward(self) -> None:
        """Keeps in mind that gradients wait for a step, which with manual optimization nothing else tells."""
        self._unstepped = {id(optimizer) for optimizer in self.optimizers}

    def note_step(self, optimizer: Optimizer) -> None:
        """Keeps in mind that ``optimizer`` has used its gradients, and in which batch."""
        self._unstepped.discard(id(optimizer))
        self._used[id(optimizer)] = _gradients_of(optimizer)
        self._stepped_in = self._trainer.fit_loop.epoch_loop.total_batch_idx

    def note_batch_by_hand(self) -> None:
        """Keeps in mind the gradients that a batch leaves, also those of a plain ``loss.backward()``."""
        for optimizer in self.optimizers:
            if (left := _gradients_of(optimizer)) and left != self._used.get(id(optimizer)):
                self._unstepped.add(id(optimizer))

    @contextmanager
    def _saving_at_once(self) -> Generator[None, None, None]:
        in_background, self._async_save = self._async_save, False
        try:
            self._background.wait()
            yield
        finally:
            self._async_save = in_background

    def _end_background_save(self) -> None:
        """Wait until the last checkpoint is on disk."""
        try:
            self._background.close()
        except RuntimeError as error:
            if self.lightning_module is None or self._trainer.state.status != TrainerStatus.INTERRUPTED:
                raise
            logger.error("%s", error)  # another error ended the run, and must be the one that the user sees

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        # What a new checkpoint replaces stays until the new one is complete.
        if self.is_global_zero:
            self._background.afterwards(lambda: remove_checkpoint(Location.of(filepath)))

    def state_part(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns a tree of sharded tensors as it goes into a checkpoint: shards, or all on rank 0. Collective."""
        return checkpoints.state_part(state, self._save_distributed_checkpoint)

    def accumulated_gradients(self) -> dict[str, Tensor]:
        """Collects the gradients accumulated so far, for a checkpoint between two micro-batches of a step: all at the
        scale of losses, also those that were unscaled to clip them, since a run that goes on unscales all.
        """
        found = checkpoints.gradient_part(self._module, self.gradient_group, self._save_distributed_checkpoint)
        unscaled, scale = self.precision_plugin.unscaled(self.optimizers)
        for name, parameter in self._module.named_parameters():
            if id(parameter) in unscaled and (gradient := found.get(clean_name(name))) is not None:
                local_tensor(gradient).mul_(scale)
        return found

    # ---- loading -----------------------------------------------------------------------------------------------------

    @override
    def join_mesh(self) -> None:
        super().join_mesh()
        forget_first_batch(self._trainer)
        begin_passes_as_ever(self._trainer)
        if self._trainer.state.fn == TrainerFn.FITTING and checkpoint_path_of(self._trainer) is not None:
            begin_passes_in_run(self._trainer)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        self._background.wait()
        path, is_sound = self._replacement.get(Location.of(self.broadcast(checkpoint_path)))
        self._restoration.path = path
        checkpoint = checkpoints.load(path, weights_only, self._trainer, is_sound)
        choose_position(checkpoint, self.data_group.rank())
        self._seen.load(checkpoint)
        self._own = {key: checkpoint.pop(key) for key in OWN_ENTRIES if key in checkpoint}  # hooks see Lightning's
        if self._trainer.state.fn == TrainerFn.FITTING:
            before_first_batch(
                self._trainer,
                lambda loader: self._seen.go_on(self._trainer, loader, self.data_rank, self.data_size),
                had_state,
            )
            begin_passes_in_run(self._trainer)  # of a requeue, too, which Lightning chooses behind setup
        return checkpoint

    @property
    def _has_begun(self) -> bool:
        """Tell whether the processes have met; before, a module that is connected is whole, and a file holds it."""
        return self._device_mesh is not None

    def _is_about_to_be_restored(self, model: PreTrainedModel) -> bool:
        """Tells whether the checkpoint of this run holds all weights of ``model``, which need not be read from
        elsewhere.

        Only where a weight that is missing after all would be an error.
        """
        path = checkpoint_path_of(self._trainer)
        if path is None or not self._module.strict_loading:
            return False
        needed = [name for name in model.state_dict() if name not in model.all_tied_weights_keys]
        return self._restoration.awaited.take_place(model, held_models(Location.of(path), needed))

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module = self._module

        def read(part: nn.Module, source: Mapping[str, Any], strict: bool) -> None:
            left_out, held = names_left_out_of(part, module), {clean_name(name) for name in source}
            restore_model(part, source, strict, left_out)
            self._restoration.awaited.note(part, source)
            forget_files_below(part, [name for name in left_out if clean_name(name) in held])

        def restore() -> None:  # looks the entry up late: callbacks that average weights exchange it in between
            load_through(module, checkpoint["state_dict"], strict, read)
            leave_to_first_rank(module, checkpoint["state_dict"], self.data_group.rank())

        self._restoration.when_set_up(restore)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        checkpoints.restore_optimizers(self._module, self.optimizers, checkpoint)
        scale = self.precision_plugin.scale_since(checkpoint)
        self._gradients = read_gradients(self._module, self._own.get(GRADIENTS, {}), scale)
        restore_random_state(self._own, self.data_group.rank())
        self._draws.restore(self._own)

    def choose_trained(self) -> None:
        """Freeze, thaw and use what the run of the checkpoint had. When training starts."""
        trained = self._what_trains
        trained.begin(self._module, self._own.pop(TRAINED, None))
        before_each_step(self._trainer, trained.note_step)
        around_validation_start(self._trainer, trained.note_before_evaluation, trained.note_evaluation)

    def go_on_monitoring(self) -> None:
        """Go on with the numbers that schedules monitored when the checkpoint was saved. When training starts."""
        go_on_monitoring(self._trainer, self._own.pop(MONITORED, None))

    def return_gradients(self) -> None:
        """Give parameters the gradients that were accumulated when the checkpoint was saved.

        When training starts: the trainer zeroes them before.
        """
        self._unstepped = {id(optimizer) for optimizer in self.optimizers if self._gradients}
        self._stepped_in = -1
        for parameter, gradient in self._gradients.items():
            parameter.grad = gradient
        self._gradients = {}


def _gradients_of(optimizer: Optimizer) -> list[tuple[int, int]]:
    """Tell gradients apart from those that were there before, or had less in them."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [(id(p.grad), version_of(local_tensor(p.grad))) for p in parameters if p.grad is not None]
