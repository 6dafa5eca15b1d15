"""What every strategy of this package does alike: data, evaluation, logged numbers and checkpoints, as Lightning hooks.

A strategy inherits from :class:`SharedHooks` and from one of Lightning's strategies, and says how large the axes of the
mesh are (``sizes``) and how the module becomes parallel (``build_parallel``). The work is done by the modules beside
this one.
"""

from abc import abstractmethod
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel
from typing_extensions import override

from lightning_automodel._compat.lightning import (
    begin_next_epoch,
    bring_own_precision,
    checkpoint_path_of,
    choose_checkpoint_paths,
    is_accumulating,
    optimizers_to_device,
)
from lightning_automodel._compat.progress import before_first_batch, training_loader
from lightning_automodel.checkpointing.accumulated_gradients import read_gradients
from lightning_automodel.checkpointing.background import BackgroundSaver
from lightning_automodel.checkpointing.description import DESCRIPTIONS, describe_models
from lightning_automodel.checkpointing.folder import GRADIENTS
from lightning_automodel.checkpointing.names import prefix_of, stored_names
from lightning_automodel.checkpointing.staging import remove_checkpoint
from lightning_automodel.checkpointing.states import restore_model
from lightning_automodel.checkpointing.storage import Location
from lightning_automodel.distributed.logs import logger
from lightning_automodel.modules.adapted_bases import names_left_out
from lightning_automodel.strategies import logging as metrics
from lightning_automodel.strategies.checkpoints import averaging
from lightning_automodel.strategies.checkpoints import hooks as checkpoints
from lightning_automodel.strategies.checkpoints.newest import Replacement, find_last
from lightning_automodel.strategies.compiled import uncompile
from lightning_automodel.strategies.data.agreement import BatchAgreement
from lightning_automodel.strategies.data.positions import POSITIONS, choose_position
from lightning_automodel.strategies.data.samplers import check_training_lengths, install_samplers, process_dataloader
from lightning_automodel.strategies.data.seen_samples import SEEN, SeenSamples
from lightning_automodel.strategies.evaluation.in_step import EvenEvaluation, disable_inference_mode
from lightning_automodel.strategies.faults.preemption import Preemption
from lightning_automodel.strategies.finite import FiniteGuard
from lightning_automodel.strategies.mesh import OnMesh
from lightning_automodel.strategies.optimizers import check_optimizers, explaining_step
from lightning_automodel.strategies.precision import choose_precision
from lightning_automodel.strategies.random_state import RANDOM_NUMBERS, RANDOM_STATES, restore_random_state

OWN_ENTRIES = (RANDOM_STATES, RANDOM_NUMBERS, POSITIONS, SEEN, DESCRIPTIONS, GRADIENTS)
"""What a checkpoint of ours holds beside Lightning's."""


class SharedHooks(OnMesh):
    """Mixin, to stand before the strategy of Lightning that it completes."""

    _save_distributed_checkpoint: bool
    _async_save: bool = False
    config: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        bring_own_precision(SharedHooks, choose_precision)
        choose_checkpoint_paths(SharedHooks, find_last)
        super().__init__(*args, **kwargs)
        self._background = BackgroundSaver()
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._own: dict[str, Any] = {}
        self._restoration = checkpoints.Restoration()
        self._replacement = Replacement()
        self._agreement = BatchAgreement()
        self._seen = SeenSamples()
        self._evaluation = EvenEvaluation()
        self._preemption = Preemption()

    @abstractmethod
    def build_parallel(self, module: "pl.LightningModule") -> None:
        """Makes what the module holds parallel, in place; called again by every call of the trainer."""

    def after_evaluation_step(self, output: Any) -> Any:
        """Receives the output of every evaluation step, and returns it."""
        return output

    # ---- the module --------------------------------------------------------------------------------------------------

    @property
    def _lightning_module(self) -> "pl.LightningModule | None":
        return vars(self).get("_lightning_module")

    @_lightning_module.setter
    def _lightning_module(self, module: "pl.LightningModule | None") -> None:
        # Where Lightning would refuse a module that went through torch.compile (utilities/compile.py).
        vars(self)["_lightning_module"] = uncompile(module)

    @override
    def connect(self, model: "pl.LightningModule") -> None:
        super().connect(model)
        metrics.install_log(model)
        self._restoration.begin()

    @override
    def join_mesh(self) -> None:
        super().join_mesh()
        averaging.adapt(self._callbacks)  # not earlier: those of configure_callbacks, too
        if self._skips_damaged:
            self._replacement.find(self._trainer, self.broadcast)

    @override
    def teardown(self) -> None:
        try:
            if self.lightning_module is not None:
                metrics.remove_log(self.lightning_module)
                averaging.restore(self._callbacks)
            self._end_background_save()
            super().teardown()
        finally:
            self._preemption.remove()

    @override
    def on_train_end(self) -> None:
        self.precision_plugin.guard.settle()
        self._background.wait()
        self._preemption.check_finally()

    def _end_background_save(self) -> None:
        """Returns when the last checkpoint is on disk."""
        try:
            self._background.close()
        except RuntimeError as error:
            if self.lightning_module is None or self._trainer.state.status != TrainerStatus.INTERRUPTED:
                raise
            logger.error("%s", error)  # another error ended the run, and must be the one that the user sees

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        disable_inference_mode(trainer)
        self._preemption.install(trainer, self._saving_at_once, self._timeout)
        self._background.timeout = self._timeout
        install_samplers(trainer, self.distributed_sampler_kwargs)
        self.build_parallel(self._module)
        self._draws.install(self._module, self.data_rank, self.root_device.type)
        self.model_to_device()
        metrics.reduce_metrics_over(self._module, self.data_group)
        metrics.count_samples_once(trainer, self.data_size)
        self._restoration.end_setup()
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            averaging.begin(self._callbacks, self._module)
            self.setup_optimizers(trainer)
            check_optimizers(self.optimizers, self._module)
        self.setup_precision_plugin()
        # Megatron-FSDP looks by itself (check_for_nan_in_grad), before it reduces.
        self.precision_plugin.guard = FiniteGuard(getattr(self.config, "nonfinite", "ignore"))
        if trainer.state.fn == TrainerFn.FITTING:
            self.optimizers_to_device()

    def optimizers_to_device(self) -> None:
        """States that an optimizer holds from its construction on go to where the parameters are."""
        optimizers_to_device(self.optimizers, self.root_device)

    # ---- data --------------------------------------------------------------------------------------------------------

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.data_size, "rank": self.data_rank}

    @property
    def is_filling(self) -> bool:
        """Whether the present evaluation step repeats a batch for the sake of other ranks, and its results are dropped.

        For steps that have effects of their own, such as writing a file.
        """
        return self._evaluation.filling

    @override
    def process_dataloader(self, dataloader: object) -> object:
        return process_dataloader(dataloader, self._trainer, self.data_rank, self.data_size, self.data_group)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        stage = self._trainer.state.stage
        assert stage is not None
        self._agreement.check(batch, self.sample_group, self.root_device, stage.value)
        return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def on_train_start(self) -> None:
        begin_next_epoch(self._trainer)
        check_training_lengths(self._trainer.num_training_batches, self.root_device)
        self._agreement.start()
        for parameter, gradient in self._gradients.items():  # not earlier: the trainer zeroes them before it starts
            parameter.grad = gradient
        self._gradients = {}

    @override
    def on_validation_start(self) -> None:
        self._start_evaluation()

    @override
    def on_test_start(self) -> None:
        self._start_evaluation()

    @override
    def on_predict_start(self) -> None:
        self._start_evaluation()

    def _start_evaluation(self) -> None:
        self._agreement.start()
        self._draws.begin(self._trainer)
        self._evaluation.start(self._trainer, self.data_group, self.root_device)

    @property
    def _trainer(self) -> "pl.Trainer":
        return self._module.trainer

    @property
    def _callbacks(self) -> list["pl.Callback"]:
        return self._trainer.callbacks  # type: ignore[attr-defined]

    @property
    def _module(self) -> "pl.LightningModule":
        """What the user passed; ``self.model`` may wrap it, and has other names for its parameters then."""
        assert self.lightning_module is not None
        return self.lightning_module

    # ---- steps -------------------------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._draws.begin(self._trainer)
        return metrics.plain_output(super().training_step(*args, **kwargs))

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self._evaluation.record("validation_step", args)
        self._preemption.check()
        return self.after_evaluation_step(super().validation_step(*args, **kwargs))

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        self._evaluation.record("test_step", args)
        self._preemption.check()
        return self.after_evaluation_step(super().test_step(*args, **kwargs))

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        self._evaluation.record("predict_step", args)
        self._preemption.check()
        return self.after_evaluation_step(super().predict_step(*args, **kwargs))

    @override
    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        with explaining_step(optimizer):
            return super().optimizer_step(optimizer, *args, **kwargs)

    # ---- numbers that are logged -------------------------------------------------------------------------------------

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any | None = "mean") -> Any:
        """Reduces over the data ranks unless ``group`` says otherwise; what is not a tensor stays as it is."""
        return metrics.reduce(tensor, group or self.data_group, reduce_op) if isinstance(tensor, Tensor) else tensor

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return metrics.reduce_decision(decision, self.root_device, every=all)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        # LightningModule.all_gather passes all ranks where the user passes nothing.
        is_default = group is None or group is dist.group.WORLD
        return metrics.gather(tensor, self.data_group if is_default else group, differentiable=sync_grads)

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def choose_checkpoints(self, distributed: bool, in_background: bool, skips_damaged: bool) -> None:
        """Folders or plain files, whether training goes on while a folder is written, and what "last" means.

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
        return False  # see checkpoints.py

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return True

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if not self._has_begun:
            return super().lightning_module_state_dict()
        self.check_all_end()
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
        added = {
            DESCRIPTIONS: describe_models(self._module),
            RANDOM_NUMBERS: self._draws.state(),
            SEEN: self._seen.describe(self._trainer, training_loader(self._trainer), self.data_size),
        }
        checkpoint = {**checkpoint, **added}
        if "optimizer_states" in checkpoint and is_accumulating(self._trainer):
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

    @contextmanager
    def _saving_at_once(self) -> Generator[None, None, None]:
        in_background, self._async_save = self._async_save, False
        try:
            self._background.wait()
            yield
        finally:
            self._async_save = in_background

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        # What a new checkpoint replaces stays until the new one is complete.
        if self.is_global_zero:
            self._background.afterwards(lambda: remove_checkpoint(Location.of(filepath)))

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        self._background.wait()
        path, is_sound = self._replacement.get(Location.of(self.broadcast(checkpoint_path)))
        self._restoration.path = path
        checkpoint = checkpoints.load(path, weights_only, self._trainer, is_sound)
        choose_position(checkpoint, self.data_group.rank(), self.data_group.size())
        self._seen.load(checkpoint)
        self._own = {key: checkpoint.pop(key) for key in OWN_ENTRIES if key in checkpoint}  # hooks see Lightning's
        if self._trainer.state.fn == TrainerFn.FITTING:
            before_first_batch(
                self._trainer, lambda loader: self._seen.go_on(self._trainer, loader, self.data_rank, self.data_size)
            )
        return checkpoint

    def state_part(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns a tree of sharded tensors as it goes into a checkpoint: shards, or all on rank 0. Collective."""
        return checkpoints.state_part(state, self._save_distributed_checkpoint)

    def accumulated_gradients(self) -> dict[str, Tensor]:
        """Collects the gradients accumulated so far, for a checkpoint between two micro-batches of a step."""
        return checkpoints.gradient_part(self._module, self.gradient_group, self._save_distributed_checkpoint)

    @property
    def _has_begun(self) -> bool:
        """Whether the processes have met; before, a module that is connected is whole, and a file holds it."""
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
        return prefix_of(needed, stored_names(Location.of(path))) is not None

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module = self._module

        def restore() -> None:  # looks the entry up late: callbacks that average weights exchange it in between
            restore_model(module, checkpoint["state_dict"], strict, names_left_out(module))

        self._restoration.when_set_up(restore)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        checkpoints.restore_optimizers(self._module, self.optimizers, checkpoint)
        self._gradients = read_gradients(self._module, self._own.get(GRADIENTS, {}))
        restore_random_state(self._own, self.data_group.rank())
        self._draws.restore(self._own)
