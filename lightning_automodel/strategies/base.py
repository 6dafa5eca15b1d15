"""What every strategy of this package does alike: data, evaluation, logged numbers and checkpoints, as Lightning hooks.

A strategy inherits from :class:`SharedHooks` and from one of Lightning's strategies, and says how large the axes of the
mesh are (``sizes``) and how the module becomes parallel (``build_parallel``). The work is done by the modules beside
this one.
"""

from abc import abstractmethod
from collections.abc import Callable, Container
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_automodel._compat.lightning.modules import optimizers_to_device
from lightning_automodel._compat.lightning.trainer import (
    average_watched_losses,
    begin_next_epoch,
    bring_own_precision,
    choose_checkpoint_paths,
    set_callbacks_for_epoch,
    skips_backward,
    tell_savers_of_resume,
)
from lightning_automodel._compat.torch.modules import have_gradient_hooks
from lightning_automodel.checkpointing.without_trainer import let_lightning_read_folders
from lightning_automodel.loading.read_values import forget_changed
from lightning_automodel.parallel.guards.gather_order import take_gathers
from lightning_automodel.parallel.guards.hooks_of_users import refuse_gradient_hooks, warn_of_later_hooks
from lightning_automodel.parallel.guards.prompts import refuse_shadows
from lightning_automodel.parallel.tensor.origins import refuse_loss_of_slices
from lightning_automodel.strategies import logging as metrics
from lightning_automodel.strategies.callback_checks import check_callbacks
from lightning_automodel.strategies.checkpoints import averaging
from lightning_automodel.strategies.checkpoints.newest import find_last
from lightning_automodel.strategies.checkpoints.saving_strategy import SavingStrategy
from lightning_automodel.strategies.compiled import uncompile
from lightning_automodel.strategies.data.agreement import Agreement
from lightning_automodel.strategies.data.samplers import check_training_lengths, install_samplers, process_dataloader
from lightning_automodel.strategies.evaluation.in_step import EvenEvaluation, disable_inference_mode
from lightning_automodel.strategies.faults.preemption import Preemption
from lightning_automodel.strategies.metric_states import reduce_metrics_over
from lightning_automodel.strategies.precision import choose_precision
from lightning_automodel.strategies.start_table import tell_start
from lightning_automodel.strategies.steps.finite import FiniteGuard
from lightning_automodel.strategies.steps.last_gradients import LastGradients, read_between_micro_batches
from lightning_automodel.strategies.steps.late_layers import LateLayers
from lightning_automodel.strategies.steps.late_tensors import LateTensors, refuse_late_tensors
from lightning_automodel.strategies.steps.losses_of_steps import LossesOfSteps
from lightning_automodel.strategies.steps.optimizers import check_optimizers, explaining_step


class SharedHooks(SavingStrategy):
    """Mixin, to stand before the strategy of Lightning that it completes."""

    config: Any
    runs_gradient_hooks = False
    """whether ``parameter.register_hook`` works: autograd gives the parameters their gradients"""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        bring_own_precision(SharedHooks, choose_precision)
        choose_checkpoint_paths(SharedHooks, find_last)
        let_lightning_read_folders()
        super().__init__(*args, **kwargs)
        self._agreement = Agreement()
        self._evaluation = EvenEvaluation()
        self._preemption = Preemption()
        self._last_gradients = LastGradients()
        self._late = LateTensors()
        self._late_layers = LateLayers()
        self._losses = LossesOfSteps()
        self._reads_between = False

    @abstractmethod
    def build_parallel(self, module: "pl.LightningModule") -> None:
        """Makes what the module holds parallel, in place; called again by every call of the trainer."""

    @abstractmethod
    def reduced_parameters(self) -> Container[Tensor] | None:
        """Collect the parameters whose gradients become those of all samples; ``None`` if all are that already."""

    def after_evaluation_step(self, output: Any) -> Any:
        """Receives the output of every evaluation step, and returns it."""
        return output

    def check_additions(self) -> None:
        """Refuses layers that were added since the module became parallel, where they could not train."""

    def note_reading(self, is_read: bool) -> None:
        """Receives whether forward passes from now on are called to be read (in a hook, for a metric), so that no
        backward pass follows, whatever their outputs say.
        """

    def free_gathered(self) -> None:
        """Frees what forward passes without a backward pass have left gathered."""

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
        install_samplers(self._trainer, self.distributed_sampler_kwargs)  # setup of a module may ask for loaders

    @override
    def teardown(self) -> None:
        try:
            if self.lightning_module is not None:
                metrics.remove_log(self.lightning_module)
                averaging.restore(self._callbacks)
            self._end_background_save()
            super().teardown()
        finally:
            self._late_layers.stop()
            take_gathers()  # those of a run that failed are not the next one's, and they keep its model
            self._preemption.remove()

    @override
    def on_train_end(self) -> None:
        self.precision_plugin.guard.settle()
        self._background.wait()
        self._preemption.check_finally()
        self.note_reading(False)

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        disable_inference_mode(trainer)
        self._preemption.install(trainer, self._saving_at_once, self._timeout)
        self._background.timeout = self._timeout
        refuse_shadows(self._module)
        self.check_gradient_hooks()
        forget_changed(self._module)
        self.build_parallel(self._module)
        self._draws.install(self._module, self.data_rank, self.root_device.type)
        self.model_to_device()
        reduce_metrics_over(self._module, self.data_group)
        metrics.count_samples_once(trainer, self.data_size)
        self._restoration.end_setup()
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self._bases.note(self._module)
            averaging.begin(self._callbacks, self._module)
            self.setup_optimizers(trainer)
            check_optimizers(self.optimizers, self._module)
            self._losses = LossesOfSteps(self.optimizers, self.data_size)
            self._check_late(self.optimizers)
            check_callbacks(self._callbacks, self._module)
        self.setup_precision_plugin()
        # Megatron-FSDP looks by itself (check_for_nan_in_grad), before it reduces.
        self.precision_plugin.guard = FiniteGuard(getattr(self.config, "nonfinite", "ignore"))
        if trainer.state.fn == TrainerFn.FITTING:
            self.optimizers_to_device()

    def refuse_layer_sync(self) -> None:
        """Refuse ``Trainer(sync_batchnorm=True)``, for strategies that shard.

        Raises:
            ValueError: if it was asked for.
        """
        if self._layer_sync is not None:
            raise ValueError(
                f"Trainer(sync_batchnorm=True): {type(self).__name__} leaves batch norms as they are, with the "
                "statistics of each rank's rows; use DDPStrategy, or convert them in configure_model with "
                "torch.nn.SyncBatchNorm.convert_sync_batchnorm (CUDA only), and leave sync_batchnorm out"
            )

    def check_gradient_hooks(self) -> None:
        """Refuse hooks on parameters that would not run as on one process; before training and before each step."""
        if not self.runs_gradient_hooks:
            refuse_gradient_hooks(self._module)

    def _check_late(self, optimizers: list[Optimizer]) -> None:
        changed = [optimizer for optimizer in optimizers if self._late.have_changed(optimizer)]
        if changed and (reduced := self.reduced_parameters()) is not None:
            refuse_late_tensors(changed, self._module, reduced)

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
        """Tell whether the present evaluation step is a filler, whose results are dropped.

        For steps that have effects of their own, such as writing a file.
        """
        return self._evaluation.filling

    @override
    def process_dataloader(self, dataloader: object) -> object:
        # Before a run, only the length of a loader is asked for (estimated_stepping_batches).
        group = None if self._device_mesh is None else self.data_group
        return process_dataloader(dataloader, self._trainer, self.data_rank, self.data_size, group)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        self._agreement.check(batch, self._trainer, self.sample_group, self.data_group, self.root_device)
        return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def on_train_start(self) -> None:
        self.note_reading(True)  # by hooks
        self.choose_trained()
        begin_next_epoch(self._trainer)
        self.go_on_monitoring()
        set_callbacks_for_epoch(self._trainer)
        tell_savers_of_resume(self._trainer)
        average_watched_losses(self._trainer, self.reduce)
        check_training_lengths(self._trainer.num_training_batches, self.root_device)
        self.check_gradient_hooks()
        warn_of_later_hooks(self._module)
        self._agreement.start(self._trainer)
        self._late_layers.start()
        self.return_gradients()
        self._reads_between = read_between_micro_batches(self._module, self._callbacks)
        self._last_gradients.start(self._trainer, self._module, self.optimizers)
        tell_start(self._trainer, self._module, self.sizes, self.config)

    @override
    def on_validation_start(self) -> None:
        self.start_evaluation()

    @override
    def on_test_start(self) -> None:
        self.start_evaluation()

    @override
    def on_predict_start(self) -> None:
        self.start_evaluation()

    def start_evaluation(self) -> None:
        """Begins a validation, a test or a prediction."""
        self._agreement.start(self._trainer)
        self._draws.begin(self._trainer)
        self._evaluation.start(self._trainer, self.data_group, self.root_device)

    # ---- steps -------------------------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._late_layers.have_come():
            self.check_additions()
        self._draws.begin(self._trainer)
        self._last_gradients.free(self._trainer, self.optimizers)
        self.note_reading(False)
        output = metrics.plain_output(super().training_step(*args, **kwargs))
        if output is None or not self._module.automatic_optimization or skips_backward(self._trainer):
            self.free_gathered()  # no backward pass follows
            self.note_reading(True)
        if not self._module.automatic_optimization:
            self.note_batch_by_hand()
        return output

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluation.round("validation_step", args):
            self._preemption.check()
            return self.after_evaluation_step(super().validation_step(*args, **kwargs))

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluation.round("test_step", args):
            self._preemption.check()
            return self.after_evaluation_step(super().test_step(*args, **kwargs))

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._evaluation.round("predict_step", args):
            self._preemption.check()
            return self.after_evaluation_step(super().predict_step(*args, **kwargs))

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)
        refuse_loss_of_slices(closure_loss)
        if self._module.automatic_optimization:
            self.note_reading(True)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        self.note_backward()

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        if have_gradient_hooks(p for group in optimizer.param_groups for p in group["params"]):
            self.check_gradient_hooks()
        self._check_late([optimizer])
        closure = self._losses.averaged(optimizer, closure, self.reduce, self.root_device)
        with explaining_step(optimizer):
            output = super().optimizer_step(optimizer, closure, *args, **kwargs)
        self.note_step(optimizer)
        return output

    # ---- numbers that are logged -------------------------------------------------------------------------------------

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any | None = "mean") -> Any:
        """Reduces over the data ranks unless ``group`` says otherwise; what is not a tensor stays as it is.

        Before the processes have met, a tensor stays as it is too, as with Lightning's strategies. Data ranks whose
        present evaluation step is a filler do not count.
        """
        if not isinstance(tensor, Tensor) or (group is None and self._device_mesh is None):
            return tensor
        if group is None and self._evaluation.in_round:
            return metrics.reduce_counted(tensor, self.data_group, reduce_op, counts=not self.is_filling)
        return metrics.reduce(tensor, group or self.data_group, reduce_op)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return metrics.reduce_decision(decision, self.root_device, every=all)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        # LightningModule.all_gather passes all ranks where the user passes nothing.
        is_default = group is None or group is dist.group.WORLD
        return metrics.gather_stacked(tensor, self.data_group if is_default else group, differentiable=sync_grads)
