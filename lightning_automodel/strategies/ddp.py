"""The Lightning strategy for replication: every rank keeps the whole model, and gradients are averaged."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from inspect import signature
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_automodel._compat.lightning import check_all_reduced, default_timeout, register_comm_hook
from lightning_automodel._compat.modules import parameters_of
from lightning_automodel._compat.strategies import expect_first_step
from lightning_automodel.config import DDPConfig
from lightning_automodel.distributed.kept_groups import keep
from lightning_automodel.distributed.logs import warn_once
from lightning_automodel.loading.initialize import broadcast_weights
from lightning_automodel.loading.pretrained import sharded_loading
from lightning_automodel.mesh import DP_REPLICATE, TP, AutoSize, Axes, MeshSizes, axis, resolve_sizes
from lightning_automodel.parallel.layer_config import config_for
from lightning_automodel.parallel.replica_check import check_replicas_every
from lightning_automodel.parallel.replication import Replication
from lightning_automodel.parallel.stages import apply_stages
from lightning_automodel.strategies.base import SharedHooks
from lightning_automodel.strategies.last_gradients import REDUCED_EACH_TIME
from lightning_automodel.strategies.replica_gradients import PlainBackward, average_gradients, reduce_in_float32
from lightning_automodel.strategies.replica_hooks import HooksOfReplicas
from lightning_automodel.strategies.submodels import check_switches_find_work, find_submodels, unwrap_compiled_children

_PREPARED = "_prepared_for_ddp"
HOOKED_EACH_TIME = (
    "a parameter has a hook (register_post_accumulate_grad_hook), so gradients are reduced at every micro-batch"
)


class DDPStrategy(SharedHooks, LightningDDPStrategy):
    """Trains any model replicated on every process, with the numbers of one device.

    Args:
        config: the switches.
        tp: 1, and so the next three: no axis but the replicas.
        cp: 1.
        dp_shard: "auto" or 1.
        dp_replicate: 1, or all processes.
        save_distributed_checkpoint: one plain Lightning file (``False``), or a folder. Both load under every strategy.
        async_save: training goes on while a folder is written.
        process_group_backend: "nccl", "gloo" or one per device type; ``None``: what ``config.backend`` says.
        timeout: of every collective.
        ddp_comm_hook: replaces the reduction of gradients, such as ``fp16_compress_hook`` of torch's
            ``ddp_comm_hooks``. Under ``bf16-true`` gradients are reduced in float32 unless it says otherwise.
        ddp_comm_state: first argument of the hook.
        ddp_comm_wrapper: such as ``fp16_compress_wrapper``, around the hook.
        model_averaging_period: steps between two averages of all weights, with a ``PostLocalSGDState``.
        ep: 1.

    Raises:
        ValueError: for a size that this strategy does not have, or if ``async_save`` comes with a plain file.
    """

    strategy_name = "automodel_ddp"
    runs_gradient_hooks = True

    def __init__(
        self,
        config: DDPConfig | None = None,
        tp: int = 1,
        cp: int = 1,
        dp_shard: AutoSize = "auto",
        dp_replicate: int = 1,
        save_distributed_checkpoint: bool = False,
        async_save: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_timeout,
        ddp_comm_hook: Callable | None = None,
        ddp_comm_state: object | None = None,
        ddp_comm_wrapper: Callable | None = None,
        model_averaging_period: int | None = None,
        ep: int = 1,
    ) -> None:
        fixed = {"tp": tp, "cp": cp, "ep": ep, "dp_shard": dp_shard, "dp_replicate": dp_replicate}
        for name, size in fixed.items():
            if size not in (1, "auto"):
                raise ValueError(
                    f"DDPStrategy({name}={size}): every process keeps the whole model and its own share of the samples,"
                    f" and there is no axis of another kind; use FSDP2TPStrategy({name}={size}), or leave {name} out"
                )
        self.config = DDPConfig.chosen(config)
        self.choose_checkpoints(save_distributed_checkpoint, async_save, self.config.skip_damaged_checkpoints)
        self._readers: ProcessGroup | None = None
        self._averages_itself = self._has_averaged = self._is_stepping = self._has_failed = False
        self._plain: PlainBackward
        self._hooks: HooksOfReplicas | None = None
        super().__init__(
            process_group_backend=process_group_backend or self.config.backend,
            timeout=timeout,
            ddp_comm_hook=ddp_comm_hook,
            ddp_comm_state=ddp_comm_state,
            ddp_comm_wrapper=ddp_comm_wrapper,
            model_averaging_period=model_averaging_period,
            **_arguments(self.config),
        )

    @property
    def sizes(self) -> MeshSizes:
        """Return the sizes of a mesh of replicas only."""
        world = self.num_nodes * self.num_processes
        return resolve_sizes(world, dp_shard=1, dp_replicate=world)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self.join_mesh()
        if not self.config.read_weights_on_all_ranks:
            size, timeout = self.num_processes, self._timeout
            self._readers = keep(("readers", size, timeout), lambda: dist.new_subgroups(size, timeout=timeout)[0])

    # ---- building the model ------------------------------------------------------------------------------------------

    @contextmanager
    @override
    def model_sharded_context(self) -> Generator[None, None, None]:
        readers = self._readers if self._readers is not None and self._readers.size() > 1 else None
        with sharded_loading(_leave_whole, self.root_device, readers, self._is_about_to_be_restored):
            yield

    @override
    def build_parallel(self, module: "pl.LightningModule") -> None:
        unwrap_compiled_children(module)
        if self._is_fitting and self._layer_sync is not None:
            self._layer_sync.apply(module)
        submodels = find_submodels(module, bare=True)
        check_switches_find_work(self.config, [submodel.module for submodel in submodels])
        for submodel in submodels:
            _check_plain(submodel.name, submodel.module)
            if not hasattr(submodel.module, _PREPARED):
                self._prepare(submodel.module)
                setattr(submodel.module, _PREPARED, True)
        of_submodels = {
            tensor for submodel in submodels for tensor in (*submodel.module.parameters(), *submodel.module.buffers())
        }
        broadcast_weights(module, self.device_mesh, apart_from=of_submodels)
        if self.config.check_replicas_every_n_steps is not None and not hasattr(module, _PREPARED):
            check_replicas_every(module, self.config.check_replicas_every_n_steps)
        setattr(module, _PREPARED, True)

    def _prepare(self, model: nn.Module) -> None:
        precision = self.precision_plugin
        axes = Axes(tp=axis(self.device_mesh, TP), data=axis(self.device_mesh, DP_REPLICATE))
        sharding = Replication(axes, self.root_device, precision.mp_policy.param_dtype)
        apply_stages(model, axes, config_for(model, self.config, tp=1), sharding, precision.param_dtype)

    @property
    def _is_fitting(self) -> bool:
        return self._trainer.state.fn == TrainerFn.FITTING

    @override
    def reduced_parameters(self) -> set[Tensor] | None:
        return None if self.data_size == 1 else set(self._module.parameters())

    # ---- reduction of gradients --------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        super().setup(trainer)
        if self._is_fitting:
            self.configure_ddp()  # after the weights of a checkpoint are in place, and the optimizer has its parameters
            self._reduced = self._trained()
            if isinstance(self._ddp_comm_state, PostLocalSGDState):
                self._enable_model_averaging()
            if self.data_size > 1:
                self._hooks = HooksOfReplicas(self._module, lambda: self._plain.is_known)
                is_held, then = lambda: self._is_stepping or not self._reduces, self._hooks.run_on_sums
                self._plain = PlainBackward(self._module, is_held, then)
                self.precision_plugin.around_backward = self._around_backward

    @property
    def _reduces(self) -> bool:
        """Tell whether gradients are due behind a backward pass: not within ``block_backward_sync``."""
        return getattr(self.model, "require_backward_grad_sync", False)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._averages_itself = False
        if self._hooks is not None:
            self._begin_passes(self._hooks)
        if self._has_failed or self._trained().keys() != self._reduced.keys():  # or another adapter is in use
            self._wrap_again()
        handle = self._module.register_forward_hook(self._end_forward)
        self._is_stepping = self._module.automatic_optimization  # its gradients are reduced with those of its loss
        try:
            return super().training_step(*args, **kwargs)
        finally:
            handle.remove()
            self._is_stepping = False
            if self._averages_itself:
                self.model.require_backward_grad_sync = True  # type: ignore[union-attr]

    def _begin_passes(self, hooks: HooksOfReplicas) -> None:
        hooks.find()
        hooks.forget()
        self._plain.forget()

    def _wrap_again(self) -> None:
        trained = self._trained()
        average_gradients([p for i, p in self._reduced.items() if i not in trained])
        self.model = self.lightning_module
        self.configure_ddp()
        expect_first_step(self)
        self._reduced, self._has_failed = trained, False

    def _end_forward(self, *_: Any) -> None:
        """Keep torch's wrapper from reducing what it was made for, if the step itself has chosen other parameters."""
        if self._module.automatic_optimization and self._must_average():
            self._averages_itself = True
            self.model.require_backward_grad_sync = False  # type: ignore[union-attr]

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        if not self._module.automatic_optimization and self._must_average():
            self._averages_itself = True  # the wrapper is not prepared, and reduces nothing
        else:
            super().pre_backward(closure_loss)
        if self._hooks is not None:
            self._plain.expect(closure_loss)

    @contextmanager
    def _around_backward(self) -> Generator[None, None, None]:
        """Surrounds autograd's work, behind which ``on_after_backward`` sees the gradients of all ranks."""
        assert self._hooks is not None
        self._hooks.find()
        try:
            with self._plain.known():
                yield
        except BaseException:  # torch's wrapper waits for the rest of this pass, and for nothing else
            self._has_failed = True
            raise
        if self._averages_itself:
            automatic, self._averages_itself = self._module.automatic_optimization, False
            average_gradients([p for p in self._module.parameters() if automatic or p.requires_grad])
            self._has_averaged = True
        self._hooks.run_on_gradients()
        if self._reduces:
            self._hooks.run_on_sums()

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        if not self._has_averaged:
            super().post_backward(closure_loss)
            if self._reduces:
                check_all_reduced(self.model)
        self._has_averaged = False

    def _must_average(self) -> bool:
        """Tell whether gradients are due, and torch's wrapper would leave some on their rank, without a word."""
        trained = self._trained()
        if not self._reduces or trained.keys() == self._reduced.keys():
            return False
        are_found = self.config.find_unused_parameters and trained.keys() < self._reduced.keys()
        return self._module.automatic_optimization or not are_found  # by hand, no gradient waits for a later backward

    def _trained(self) -> dict[int, nn.Parameter]:
        """Collect what torch's wrapper reduces, which it decides on when it is made, by its ids."""
        return {id(parameter): parameter for parameter in parameters_of(self._module) if parameter.requires_grad}

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Keeps the gradients of backward passes on their rank, within this context."""
        if self._reads_between or self._have_hooks_of_sums():
            warn_once(REDUCED_EACH_TIME if self._reads_between else HOOKED_EACH_TIME)
            yield
            return
        if not self.config.static_graph:
            with super().block_backward_sync():
                yield
            return
        # Within no_sync torch crashes in the first step and stops reducing afterwards (pytorch 143580, 187732). Means
        # of gradients that are equal already stay what they are, so reducing each time is exact.
        warn_once("static_graph=True: gradients are reduced at every micro-batch, since torch cannot defer it then")
        yield

    def _have_hooks_of_sums(self) -> bool:
        if self._hooks is None:
            return False
        self._hooks.find()
        return self._hooks.read_sums

    @override
    def _register_ddp_hooks(self) -> None:
        # Lightning does so on CUDA only; gloo calls hooks too.
        assert isinstance(self.model, DistributedDataParallel)
        if self._ddp_comm_hook is not None:
            register_comm_hook(self.model, self._ddp_comm_state, self._ddp_comm_hook, self._ddp_comm_wrapper)
        elif any(p.requires_grad and p.dtype.itemsize < 4 for p in self.model.parameters()):
            self.model.register_comm_hook(None, reduce_in_float32)

    @override
    def on_exception(self, exception: BaseException) -> None:
        text = str(exception)
        super().on_exception(exception)
        if "Expected to have finished reduction in the prior iteration" in text:  # of which Lightning says less
            exception.args = (
                "training_step left parameters that require a gradient unused. If that is meant, freeze them "
                "(requires_grad_(False) in configure_model), or use DDPConfig(find_unused_parameters=True). "
                f"torch says: {text}",
            )

    @override
    def teardown(self) -> None:
        self.model = self.lightning_module  # without the wrapper
        if self._hooks is not None:
            self._plain.remove()
            self._hooks.remove()
        super().teardown()


def _leave_whole(_: nn.Module) -> None:
    """Does nothing between building on meta and reading."""


def _arguments(config: DDPConfig) -> dict[str, Any]:
    """Collects the arguments of torch's wrapper, which need not send the weights: ``build_parallel`` has."""
    # torch 2.13 gave the argument another name, and warns of the old one; without initial sync they are the same.
    renamed = "forward_sync_buffers" in signature(DistributedDataParallel).parameters
    return {
        "forward_sync_buffers" if renamed else "broadcast_buffers": config.broadcast_buffers,
        "find_unused_parameters": config.find_unused_parameters,
        "static_graph": config.static_graph,
        "bucket_cap_mb": config.bucket_cap_mb,
        "gradient_as_bucket_view": config.gradient_as_bucket_view,
        "init_sync": False,
    }


def _check_plain(name: str, module: nn.Module) -> None:
    if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        raise ValueError(
            f"{name} was made parallel by another strategy, and this one needs whole parameters on every process; "
            "build a new LightningModule"
        )
