"""The Lightning strategy for NVIDIA's Megatron-FSDP: hooks that tell the library where passes and steps begin."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerStatus
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_automodel._compat.lightning.modules import default_timeout
from lightning_automodel._compat.lightning.trainer import is_accumulating
from lightning_automodel._compat.torch.gloo import gloo_in_order
from lightning_automodel.checkpointing.files.folder import GRADIENTS
from lightning_automodel.checkpointing.hugging_face.save_adapters import install_saving_of_adapters
from lightning_automodel.config import MegatronFSDPConfig
from lightning_automodel.distributed.logs import warn_once
from lightning_automodel.distributed.uneven_shards import PARTITION, complete_state
from lightning_automodel.distributed.whole_numbers import norms_by
from lightning_automodel.loading.initialize import broadcast_weights, materialize
from lightning_automodel.loading.placed_parameters import place, values_aside
from lightning_automodel.loading.pretrained import sharded_loading
from lightning_automodel.loading.quantized import refuse_four_bit
from lightning_automodel.loading.whole_values import whole_values
from lightning_automodel.mesh import DP_SHARD, TP, AutoSize, Axes, MeshSizes, axis, resolve_sizes
from lightning_automodel.parallel.adapters import install_peft_models
from lightning_automodel.parallel.guards.hooks_of_users import refuse_hooks_after_accumulation
from lightning_automodel.parallel.guards.prompts import refuse_prompts
from lightning_automodel.parallel.guards.replica_check import check_replicas, check_replicas_every
from lightning_automodel.parallel.megatron_fsdp import HAVE_MEGATRON_FSDP, NOT_INSTALLED, building, device
from lightning_automodel.strategies.base import SharedHooks
from lightning_automodel.strategies.sharded_use import explain_use_of_shards
from lightning_automodel.strategies.submodels import (
    Submodel,
    check_mesh,
    check_switches_find_work,
    find_submodels,
    refuse_own_parameters,
    refuse_single_tokens,
    unwrap_compiled_children,
)

_PASSES = "_passes_of_megatron_fsdp"
_MESH = "_mesh_of_megatron_fsdp"
_UNKNOWN_GRADIENTS = (
    "MegatronFSDPStrategy does not go on from, because the library keeps gradients in buffers of its own; save after "
    "an optimizer step (ModelCheckpoint(every_n_train_steps=...) does), or use FSDP2TPStrategy or DDPStrategy"
)


class MegatronFSDPStrategy(SharedHooks, ModelParallelStrategy):
    """Trains any Hugging Face model tensor-parallel and sharded by Megatron-FSDP, with the numbers of one device.

    The sizes multiply to the number of processes: ``dp x cp x tp = devices x num_nodes``. For CUDA devices.

    Args:
        tp: ranks that split each layer's matrices; they see the same batch.
        cp: ranks that split each sequence. Not available yet: 1.
        dp: ranks that see different samples and share parameters, gradients and optimizer states among them.
        config: all other switches.
        save_distributed_checkpoint: a folder with a part per rank (``True``), or one plain Lightning file.
        async_save: training goes on while a folder is written.
        process_group_backend: "nccl", or one per device type; ``None``: what ``config.backend`` says.
        timeout: of every collective.
        dp_replicate: 1; hybrid sharding is FSDP2TPStrategy's.
        pp: 1; there is no pipeline.
        ep: 1; experts are split by ``tp``.

    Raises:
        ValueError: if a size is not positive or not available.
    """

    strategy_name = "megatron_fsdp"

    def __init__(
        self,
        tp: int = 1,
        cp: int = 1,
        dp: AutoSize = "auto",
        config: MegatronFSDPConfig | None = None,
        save_distributed_checkpoint: bool = True,
        async_save: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_timeout,
        dp_replicate: int = 1,
        pp: int = 1,
        ep: int = 1,
    ) -> None:
        _refuse_sizes({"cp": cp, "dp_replicate": dp_replicate, "pp": pp, "ep": ep})
        if not HAVE_MEGATRON_FSDP:
            raise ValueError(f"{NOT_INSTALLED}, or use FSDP2TPStrategy")
        self.config = MegatronFSDPConfig.chosen(config)
        super().__init__(
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend or self.config.backend,
            timeout=timeout,
        )
        self.choose_checkpoints(save_distributed_checkpoint, async_save, self.config.skip_damaged_checkpoints)
        self._requested = {"tp": tp, "cp": cp, "dp_shard": dp}
        fixed = tp * (dp if isinstance(dp, int) else 1)
        resolve_sizes(fixed, tp=tp, dp_shard=dp)

    @override
    def check_gradient_hooks(self) -> None:
        super().check_gradient_hooks()
        why = "it would not find the gradient, which Megatron-FSDP moves to a buffer of its own"
        refuse_hooks_after_accumulation(self._module, why)

    # ---- sizes and mesh ----------------------------------------------------------------------------------------------

    @property
    def sizes(self) -> MeshSizes:
        """Return the size of each axis, resolved against the number of processes."""
        return resolve_sizes(self.num_nodes * self.num_processes, **self._requested)  # type: ignore[arg-type]

    @override
    def before_launch(self) -> None:
        device.require_cuda(self.root_device)
        _ = self.sizes  # an error here comes before any process is started
        self.refuse_layer_sync()

    @override
    def setup_environment(self) -> None:
        with gloo_in_order():
            self._setup_distributed()
        self.join_mesh()

    # ---- building the model ------------------------------------------------------------------------------------------

    @contextmanager
    @override
    def model_sharded_context(self) -> Generator[None, None, None]:
        with (
            sharded_loading(
                lambda model: place(model, self._split), self.root_device, is_restored=self._is_about_to_be_restored
            ),
            whole_values(),
        ):
            yield

    def _split(self, model: nn.Module) -> None:
        """Splits over tp before weights are read: each rank reads its slices, and shards them afterwards."""
        refuse_four_bit(model)
        building.split_over_tp(model, self._axes, self.config)

    @override
    def build_parallel(self, module: "pl.LightningModule") -> None:
        from lightning_automodel.parallel.megatron_fsdp.passes import Passes
        from lightning_automodel.parallel.megatron_fsdp.sharded import ShardedModules

        unwrap_compiled_children(module)
        install_saving_of_adapters(module)
        install_peft_models(module)
        if self._passes is not None:
            check_mesh("the model", vars(module)[_MESH], self.device_mesh)
            return
        if self.precision_plugin.precision == "16-mixed":
            raise ValueError(
                "precision='16-mixed': loss scaling needs gradients before Megatron-FSDP has reduced them; use "
                "'bf16-mixed', or FSDP2TPStrategy"
            )
        refuse_single_tokens(module)
        submodels = find_submodels(module)
        refuse_own_parameters(module)
        check_switches_find_work(self.config, [submodel.module for submodel in submodels])
        originals = [self._split_submodel(submodel) for submodel in submodels]
        vars(module)[_MESH] = self.device_mesh
        modules = [submodel.module for submodel in submodels]
        sharded = ShardedModules(
            modules, self._axes.data, self._axes.tp, self.config, self._dtypes, self.root_device, originals
        )
        vars(module)[_PASSES] = Passes(sharded, modules)
        if self.config.check_replicas_every_n_steps is not None:
            check_replicas_every(module, self.config.check_replicas_every_n_steps, sharded.replicas)

    @override
    def reduced_parameters(self) -> set[Tensor]:
        return {p for p in self._module.parameters() if hasattr(p, PARTITION)}

    @override
    def check_replicas(self, module: "pl.LightningModule") -> None:
        check_replicas(module, self._sharded.replicas)

    def _split_submodel(self, submodel: Submodel) -> dict[str, Tensor]:
        if submodel.is_sharded:
            raise ValueError(f"{submodel.name} was made parallel by FSDP2TPStrategy; build a new LightningModule")
        if not building.is_split(submodel.module):
            self._split_in_memory(submodel.module)
        broadcast_weights(submodel.module, self.device_mesh)  # what files lack, or nobody has seeded
        return building.finish_split(submodel.module, self._axes.tp, self._dtypes)

    def _split_in_memory(self, model: nn.Module) -> None:
        with values_aside(model):
            self._split(model)
        if any(parameter.is_meta for parameter in model.parameters()):
            materialize(model, self.root_device)

    @property
    def _axes(self) -> Axes:
        return Axes(tp=axis(self.device_mesh, TP), data=axis(self.device_mesh, DP_SHARD))

    @property
    def _dtypes(self) -> building.Dtypes:
        precision = self.precision_plugin
        keeps = precision.param_dtype == torch.float32 or self.config.preserve_fp32_weights
        return building.Dtypes(
            compute=precision.mp_policy.param_dtype,
            stored=precision.param_dtype,
            main=torch.float32 if keeps else None,
            reduction=torch.float32 if self.config.grad_reduce_in_fp32 else precision.mp_policy.reduce_dtype,
        )

    @property
    def _passes(self) -> Any:
        return vars(self._module).get(_PASSES)

    @property
    def _sharded(self) -> Any:
        return self._passes.sharded

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        refuse_prompts(self._module, self.sizes.tp)
        super().setup(trainer)
        self.precision_plugin.clip_norm = self._sharded.norms.clip
        self.precision_plugin.around_backward = self._passes.backward
        self.precision_plugin.around_hooks = partial(norms_by, self._sharded.norms.norm_of)
        for optimizer in self.optimizers:
            optimizer.register_step_post_hook(lambda *_: setattr(self._passes, "is_used", True))

    @override
    def model_to_device(self) -> None:
        for tensor in self._module.buffers():
            tensor.data = tensor.data.to(self.root_device)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        complete_state(optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer)
        return super().optimizer_state(optimizer)

    @override
    def does_step_anew(self) -> bool:  # also between its micro-batches, whose gradients nobody has
        is_interrupted = self._trainer.state.status == TrainerStatus.INTERRUPTED or self._preemption.is_acting
        return super().does_step_anew() or (is_interrupted and is_accumulating(self._trainer))

    @override
    def note_batch_by_hand(self) -> None:
        """Does nothing: gradients are parts of one buffer, and do not tell which of them have changed."""

    @override
    def is_within_step(self) -> bool:
        if self._module.automatic_optimization:
            return super().is_within_step()
        optimized = (p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"])
        is_left = bool(self._unstepped) or any(p.grad is not None for p in optimized)
        waits: bool = self.reduce_boolean_decision(is_left and not self._passes.is_used, all=False)
        if self._unstepped and not waits:
            self._passes.warn_of_others()
        return waits

    @override
    def accumulated_gradients(self) -> dict[str, Tensor]:
        if self._trainer.state.status != TrainerStatus.INTERRUPTED and not self._preemption.is_acting:
            raise RuntimeError(f"a checkpoint between the micro-batches of an optimizer step {_UNKNOWN_GRADIENTS}")
        warn_once(
            "the checkpoint of this interruption lacks the gradients of an optimizer step that is not complete: its "
            "micro-batches are passed over when the run goes on"
        )
        return {}

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._own.get(GRADIENTS):
            raise RuntimeError(
                f"{self._restoration.path} was saved between the micro-batches of an optimizer step, which "
                f"{_UNKNOWN_GRADIENTS}"
            )
        super().load_optimizer_state_dict(checkpoint)

    # ---- steps -------------------------------------------------------------------------------------------------------

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Marks backward passes as part of a window of micro-batches that is not complete, within this context.

        Raises:
            ValueError: if ``on_after_backward`` or ``backward`` would see no gradients there.
        """
        if self._reads_between:
            raise ValueError(
                "on_after_backward or backward names gradients, and Megatron-FSDP keeps those of all micro-batches but "
                "the last of a step in buffers of its own; change gradients in on_before_optimizer_step, or use "
                "accumulate_grad_batches=1, or FSDP2TPStrategy"
            )
        self._passes.is_accumulating = True
        try:
            yield
        finally:
            self._passes.is_accumulating = False

    @override
    def note_reading(self, is_read: bool) -> None:
        self._passes.is_read = is_read

    @override
    def free_gathered(self) -> None:
        self._sharded.end_forward(is_trained=False)

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        if not self._module.automatic_optimization:
            self.free_gathered()  # hooks of the step see what it changes
        return super().optimizer_step(*args, **kwargs)

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        explain_use_of_shards(exception, of_rows=True)

    @override
    def on_validation_end(self) -> None:
        self._sharded.after_evaluation()

    @override
    def on_test_end(self) -> None:
        self._sharded.after_evaluation()

    @override
    def on_predict_end(self) -> None:
        self._sharded.after_evaluation()


def _refuse_sizes(sizes: dict[str, int]) -> None:
    ways = {
        "cp": "its hooks do not know parts of a sequence; use FSDP2TPStrategy(cp=...), or leave it at 1",
        "dp_replicate": "use FSDP2TPStrategy(dp_replicate=...), or leave it at 1",
        "pp": "there is no pipeline parallelism; use tp and dp",
        "ep": "its experts are split by tp; use FSDP2TPStrategy(ep=...), or leave it at 1",
    }
    for name, size in sizes.items():
        if size != 1:
            raise ValueError(f"MegatronFSDPStrategy({name}={size}): {ways[name]}")
