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
    checkpoint_path_of,
    is_accumulating,
    optimizers_to_device,
)
from lightning_automodel.accumulation import read_gradients
from lightning_automodel.checkpointing.background import BackgroundSaver
from lightning_automodel.checkpointing.description import DESCRIPTIONS, describe_models
from lightning_automodel.checkpointing.folder import GRADIENTS
from lightning_automodel.checkpointing.names import prefix_of, stored_names
from lightning_automodel.checkpointing.staging import remove_checkpoint
from lightning_automodel.checkpointing.states import restore_model
from lightning_automodel.checkpointing.storage import Location
from lightning_automodel.logs import logger
from lightning_automodel.strategies import averaging, checkpoints, metrics
from lightning_automodel.strategies.agreement import BatchAgreement
from lightning_automodel.strategies.compiled import uncompile
from lightning_automodel.strategies.data import check_training_lengths, install_samplers, process_dataloader
from lightning_automodel.strategies.evaluation import EvenEvaluation, disable_inference_mode
from lightning_automodel.strategies.on_mesh import OnMesh
from lightning_automodel.strategies.positions import choose_position
from lightning_automodel.strategies.preemption import Preemption
from lightning_automodel.strategies.random_state import restore_random_state


class SharedHooks(OnMesh):
    """Mixin, to stand before the strategy of Lightning that it completes."""

    _save_distributed_checkpoint: bool
    _async_save: bool = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._background = BackgroundSaver()
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._restoration = checkpoints.Restoration()
        self._agreement = BatchAgreement()
        self._evaluation = EvenEvaluation()
        self._preemption = Preemption()

    @abstractmethod
    def build_parallel(self, module: "pl.LightningModule") -> None:
        """Makes what the module holds parallel, in place; called again by every call of the trainer."""

    def after_evaluation_step(self, output: Any) -> Any:
        """Called with the output of every evaluation step."""
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
        averaging.adapt(self._callbacks)
        self._restoration.begin()

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
        self.model_to_device()
        metrics.reduce_metrics_over(self._module, self.data_group)
        metrics.count_samples_once(trainer, self.data_size)
        self._restoration.end_setup()
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            averaging.begin(self._callbacks, self._module)
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
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
        self._agreement.check(batch, self.tp_group, self.root_device, stage.value)
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

    # ---- numbers that are logged -------------------------------------------------------------------------------------

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any | None = "mean") -> Any:
        """Over the data ranks unless ``group`` says otherwise; what is not a tensor stays as it is."""
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

    def choose_checkpoints(self, distributed: bool, in_background: bool) -> None:
        """Folders or plain files, and whether training goes on while a folder is written.

        Raises:
            ValueError: for files in the background.
        """
        self._save_distributed_checkpoint, self._async_save = distributed, in_background
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
        self.check_all_end()
        return checkpoints.model_part(self._module, self._save_distributed_checkpoint)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return checkpoints.optimizer_part(self._module, optimizer, self._save_distributed_checkpoint)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        assert self.lightning_module is not None
        path = Location.of(self.broadcast(filepath))
        checkpoint = {**checkpoint, DESCRIPTIONS: describe_models(self.lightning_module)}
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
        self._restoration.path = path = Location.of(self.broadcast(checkpoint_path))
        checkpoint = checkpoints.load(path, weights_only, self._trainer)
        choose_position(checkpoint, self.data_group.rank(), self.data_group.size())
        return checkpoint

    def state_part(self, state: dict[str, Any]) -> dict[str, Any]:
        """A tree of sharded tensors as it goes into a checkpoint: shards, or all on rank 0. Collective."""
        return checkpoints.state_part(state, self._save_distributed_checkpoint)

    def accumulated_gradients(self) -> dict[str, Tensor]:
        """What the micro-batches of an optimizer step have accumulated so far, for a checkpoint between them."""
        return checkpoints.gradient_part(self._module, self.data_group, self._save_distributed_checkpoint)

    def _is_about_to_be_restored(self, model: PreTrainedModel) -> bool:
        """Whether the checkpoint of this run holds all weights of ``model``, which need not be read from elsewhere.

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
        self._restoration.when_set_up(lambda: restore_model(module, checkpoint["state_dict"], strict))

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        checkpoints.restore_optimizers(self._module, self.optimizers, checkpoint)
        self._gradients = read_gradients(self._module, checkpoint.get(GRADIENTS, {}))
        restore_random_state(checkpoint, self.data_group.rank())
