"""The Lightning strategy for tensor parallelism with FSDP2: hooks that call the parallelizer."""

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedModel
from typing_extensions import override

from lightning_automodel._compat.dtensor.tensors import is_offloaded
from lightning_automodel._compat.fsdp2.reduction import reduce_what_waits
from lightning_automodel._compat.fsdp2.units import follow_what_trains, fsdp_units
from lightning_automodel._compat.lightning.modules import default_timeout, set_device
from lightning_automodel._compat.torch.gloo import gloo_in_order
from lightning_automodel._compat.torch.modules import hooks_after_accumulation_kept
from lightning_automodel.checkpointing.hugging_face.save_adapters import install_saving_of_adapters
from lightning_automodel.config import FSDP2Config
from lightning_automodel.distributed.logs import warn_once
from lightning_automodel.loading.host_offload import BACKEND, move
from lightning_automodel.loading.initialize import materialize
from lightning_automodel.loading.placed_parameters import place, values_aside
from lightning_automodel.loading.placeholders import reserve
from lightning_automodel.loading.pretrained import sharded_loading
from lightning_automodel.loading.whole_values import whole_values
from lightning_automodel.mesh import DP_REPLICATE, AutoSize, MeshSizes, axis, resolve_sizes
from lightning_automodel.parallel.adapters import install_peft_models
from lightning_automodel.parallel.fsdp2.gathered import call_to_read, free, free_copies
from lightning_automodel.parallel.fsdp2.running import fsdp_roots, gradients_held, reshard
from lightning_automodel.parallel.guards.copied_views import warn_of_copied_views
from lightning_automodel.parallel.guards.hooks_of_users import (
    find_hook_after_accumulation,
    refuse_hooks_after_accumulation,
)
from lightning_automodel.parallel.guards.own_memory import give_own_memory
from lightning_automodel.parallel.guards.prompts import refuse_prompts
from lightning_automodel.parallel.layer_config import config_for
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.plans.experts import has_experts
from lightning_automodel.plans.selection import has_rules
from lightning_automodel.strategies.base import SharedHooks
from lightning_automodel.strategies.own_parameters.computing import OwnParameters
from lightning_automodel.strategies.own_parameters.places import Place, hold_whole
from lightning_automodel.strategies.sharded_use import explain_use_of_shards, refuse_unreduced
from lightning_automodel.strategies.steps.last_gradients import REDUCED_EACH_TIME, run_before_backward, run_before_steps
from lightning_automodel.strategies.submodels import (
    Submodel,
    check_complete,
    check_mesh,
    check_switches_find_work,
    find_own_parameters,
    find_submodels,
    names_of_own_parameters,
    no_experts,
    no_plan,
    refuse_additions,
    unwrap_compiled_children,
)


class FSDP2TPStrategy(SharedHooks, ModelParallelStrategy):
    """Trains any Hugging Face model tensor-parallel and sharded by FSDP2, with the numbers of one device.

    What ``configure_model`` (or ``__init__``) builds is made parallel. The sizes multiply to the number of processes::

        dp_replicate x dp_shard x cp x tp = devices x num_nodes

    Args:
        tp: ranks that split each layer's matrices; they see the same batch.
        cp: ranks that split each sequence; they see the same batch (``docs/context.md``).
        dp_shard: ranks that see different samples and share the parameters among them; ``"auto"``: what remains.
        dp_replicate: groups of ranks that each hold all shards (hybrid sharding).
        ep: ranks of dp_shard x cp among which tokens travel to whole experts (``docs/experts.md``); 1: experts are
            gathered like all else. It multiplies nothing: who stores what stays as it is.
        config: all other switches.
        save_distributed_checkpoint: a folder with a part per rank (``True``), or one plain Lightning file.
        async_save: training goes on while a checkpoint is written; it waits only for the copy to host memory, and for
            the checkpoint before if that is still being written. For folders.
        process_group_backend: "nccl", "gloo" or one per device type; ``None``: what ``config.backend`` says.
        timeout: of every collective.
        pp: 1; there is no pipeline.

    Raises:
        ValueError: if a size is not positive, or not available, or if ``async_save`` comes with a plain file.
    """

    strategy_name = "fsdp2_tp"
    _runs_hooks = False  # of users, on gradients as they are accumulated
    _is_watched = False  # by hooks of users, between a forward pass and its backward pass
    _has_hooks_of_steps = False  # of users, which run before each

    def __init__(
        self,
        tp: int = 1,
        cp: int = 1,
        dp_shard: AutoSize = "auto",
        dp_replicate: int = 1,
        config: FSDP2Config | None = None,
        save_distributed_checkpoint: bool = True,
        async_save: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_timeout,
        ep: int = 1,
        pp: int = 1,
    ) -> None:
        if pp != 1:
            raise ValueError(f"FSDP2TPStrategy(pp={pp}): there is no pipeline parallelism; use tp, ep, cp and dp_shard")
        self.config = FSDP2Config.chosen(config)
        super().__init__(
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend or self.config.backend,
            timeout=timeout,
        )
        self._units: list[FSDPModule] = []  # of the module that trains
        self._roots: list[FSDPModule] = []
        self._noting_changes: Callable[[], AbstractContextManager[None]] = nullcontext  # by steps, of own parameters
        self._requested = {"tp": tp, "cp": cp, "dp_shard": dp_shard, "dp_replicate": dp_replicate, "ep": ep}
        self._check_requested()
        self.choose_checkpoints(save_distributed_checkpoint, async_save, self.config.skip_damaged_checkpoints)

    def _check_requested(self) -> None:
        fixed = {name: size for name, size in self._requested.items() if size != "auto"}
        world = _product({name: size for name, size in fixed.items() if name != "ep" or "dp_shard" not in fixed})
        resolve_sizes(world, **fixed)

    # ---- sizes and mesh ----------------------------------------------------------------------------------------------

    @property
    def sizes(self) -> MeshSizes:
        """Return the size of each axis, resolved against the number of processes."""
        return resolve_sizes(self.num_nodes * self.num_processes, **self._requested)  # type: ignore[arg-type]

    @override
    def before_launch(self) -> None:
        _ = self.sizes  # an error here comes before any process is started
        self.refuse_layer_sync()

    @override
    def setup_environment(self) -> None:
        with gloo_in_order():
            self._setup_distributed()
        self.join_mesh()

    @override
    def own_backend(self) -> str | None:
        offloads = self.root_device.type == "cuda" and self.config.offload_policy
        return BACKEND if offloads and self._process_group_backend is None else None

    # ---- building the model ------------------------------------------------------------------------------------------

    @contextmanager
    @override
    def model_sharded_context(self) -> Generator[None, None, None]:
        replicas = axis(self.device_mesh, DP_REPLICATE).get_group()
        is_shared = self.config.broadcast_weights and replicas.size() > 1
        with (
            sharded_loading(
                lambda model: place(model, self._parallelize),
                self.root_device,
                replicas if is_shared else None,
                self._is_about_to_be_restored,
            ),
            whole_values(),
        ):
            yield

    def _parallelize(self, module: nn.Module) -> None:
        precision, config = self.precision_plugin, config_for(module, self.config, self.sizes.tp)
        parallelize(module, self.device_mesh, config, mp_policy=precision.mp_policy, param_dtype=precision.param_dtype)

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        self._runs_hooks = find_hook_after_accumulation(self._module) is not None
        refuse_prompts(self._module, self.sizes.tp)
        super().setup(trainer)

    @override
    def build_parallel(self, module: "pl.LightningModule") -> None:
        unwrap_compiled_children(module)
        install_saving_of_adapters(module)
        install_peft_models(module)
        reshard(module)  # what the last call left gathered, if its last step had no backward pass
        give_own_memory(module)  # parts of it are sharded one by one, and may share memory with each other
        submodels = find_submodels(module)
        places = find_own_parameters(module, submodels)
        self._setup_submodels(submodels)
        if places:
            self._hold_own_parameters(places, submodels)
        else:
            OwnParameters.leave_alone(submodel.module for submodel in submodels)

    def _hold_own_parameters(self, places: list[Place], submodels: list[Submodel]) -> None:
        mesh = next((submodel.mesh for submodel in submodels if submodel.mesh is not None), self.device_mesh)
        hold_whole(places, mesh, self.root_device, self.precision_plugin.param_dtype)
        own = OwnParameters.of(self._module, places)
        own.follow_passes(submodel.module for submodel in submodels)
        self.precision_plugin.around_forward = own.in_place
        self.precision_plugin.around_backward, self._noting_changes = own.backward, own.step

    def _setup_submodels(self, submodels: list[Submodel]) -> None:
        tp = self.sizes.tp
        if tp > 1 and not any(has_rules(submodel.module, self.config.tp_plan) for submodel in submodels):
            raise ValueError(no_plan(type(self.lightning_module).__name__, tp, submodels))
        if self.sizes.ep > 1 and not any(has_experts(submodel.module) for submodel in submodels):
            raise ValueError(no_experts(type(self.lightning_module).__name__, self.sizes.ep, submodels))
        check_switches_find_work(self.config, [submodel.module for submodel in submodels])
        for submodel in submodels:
            if submodel.is_sharded:
                check_complete(submodel, self.config.tower_policy)
                check_mesh(submodel.name, submodel.mesh, self.device_mesh)
                continue
            with values_aside(submodel.module):
                self._parallelize(submodel.module)
            if any(p.is_meta for p in submodel.module.parameters()):
                if isinstance(submodel.module, PreTrainedModel) and self._is_about_to_be_restored(submodel.module):
                    reserve(submodel.module, self.root_device)  # random weights are drawn whole, for nothing here
                materialize(submodel.module, self.root_device)

    @override
    def reduced_parameters(self) -> set[Tensor]:
        return {p for p in self._module.parameters() if isinstance(p, DTensor)}

    @override
    def check_additions(self) -> None:
        refuse_additions(self._module, self.config.tower_policy, trainable_only=self.sizes.tp == 1)

    @override
    def model_to_device(self) -> None:
        assert self.model is not None
        with hooks_after_accumulation_kept(self.model):  # of shards that are copied autograd lets go
            move(self.model, self.root_device)
        set_device(self.model, self.root_device)

    @override
    def optimizers_to_device(self) -> None:
        assert self.model is not None
        if not is_offloaded(self.model):
            super().optimizers_to_device()

    # ---- steps -------------------------------------------------------------------------------------------------------

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Keeps gradients of backward passes to the rank, within this context: they are reduced with the last
        micro-batch (``defer_fsdp_grad_sync``), or at least not over the replicas.
        """
        assert self.model is not None
        if self._reads_between:
            warn_once(REDUCED_EACH_TIME)
        each = self._reads_between or self._runs_hooks
        with nullcontext() if each else gradients_held(self.model, self.config.defer_fsdp_grad_sync):
            yield

    @override
    def on_train_start(self) -> None:
        warn_of_copied_views()
        self.check_additions()
        name = find_hook_after_accumulation(self._module)
        self._runs_hooks = name is not None
        if name is not None and self.config.defer_fsdp_grad_sync:
            warn_once(
                f"{name} has a hook (register_post_accumulate_grad_hook), so gradients are reduced at every micro-batch"
            )
        self._units, self._roots = fsdp_units(self._module), fsdp_roots(self._module)
        self._is_watched = run_before_backward(self._module, self._callbacks)
        self._has_hooks_of_steps = run_before_steps(self._module, self._callbacks)
        super().on_train_start()

    @override
    def start_evaluation(self) -> None:
        super().start_evaluation()
        if self.sizes.tp > 1:
            self.check_additions()

    @override
    def note_reading(self, is_read: bool) -> None:
        call_to_read(self._roots, is_read)

    @override
    def free_gathered(self) -> None:
        follow_what_trains(self._units)
        free(self._units)

    @override
    def check_gradient_hooks(self) -> None:
        super().check_gradient_hooks()
        if not self._runs_hooks and self._trainer.accumulate_grad_batches > 1 and self.config.defer_fsdp_grad_sync:
            why = "it was registered in a run, which reduces gradients in the last micro-batch of a step only"
            refuse_hooks_after_accumulation(self._module, f"{why}; register it before training begins")

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().training_step(*args, **kwargs)
        if output is None and self._module.automatic_optimization and self.world_size == 1:  # on more, an error follows
            reduce_what_waits(self._units)  # if it was the last micro-batch of a step: no backward pass does
        if self._is_watched:
            self.free_gathered()  # the backward pass gathers again
        return output

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)
        if self._is_watched:
            self.free_gathered()
        else:
            follow_what_trains(self._units)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        reduce_what_waits(self._units)
        if self._module.automatic_optimization:
            refuse_unreduced(self._module, self._units)
            self.free_gathered()  # models that the backward pass has not reached

    @override
    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not self._module.automatic_optimization:
            refuse_unreduced(self._module, self._units)
            if self._has_hooks_of_steps:  # which see what it changes, and models that it does not
                self.free_gathered()
            else:
                free_copies(self._units, optimizer)
        with self._noting_changes():
            return super().optimizer_step(optimizer, *args, **kwargs)

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        explain_use_of_shards(exception, own=names_of_own_parameters(self._lightning_module))

    @override
    def after_evaluation_step(self, output: Any) -> Any:
        # The backward pass frees gathered parameters; evaluation has none.
        assert self.model is not None
        reshard(self.model)
        return output


def _product(sizes: Mapping[str, Any]) -> int:
    product = 1
    for size in sizes.values():
        product *= size if isinstance(size, int) else 1
    return product
