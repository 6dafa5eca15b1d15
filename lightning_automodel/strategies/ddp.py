"""The Lightning strategy for replication: every rank keeps the whole model, and gradients are averaged."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from inspect import signature
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_automodel._compat.lightning.modules import default_timeout
from lightning_automodel._compat.torch.gloo import gloo_in_order
from lightning_automodel.config import DDPConfig
from lightning_automodel.distributed.kept_groups import keep
from lightning_automodel.loading.initialize import broadcast_weights, stored_dtype
from lightning_automodel.loading.pretrained import sharded_loading
from lightning_automodel.mesh import DP_REPLICATE, TP, AutoSize, Axes, MeshSizes, axis, resolve_sizes
from lightning_automodel.parallel.adapters import install_peft_models
from lightning_automodel.parallel.guards.replica_check import check_replicas_every
from lightning_automodel.parallel.layer_config import config_for
from lightning_automodel.parallel.replication import Replication
from lightning_automodel.parallel.stages import apply_stages
from lightning_automodel.strategies.replicas.reduction import ReducedReplicas
from lightning_automodel.strategies.submodels import check_switches_find_work, find_submodels, unwrap_compiled_children

_PREPARED = "_prepared_for_ddp"


class DDPStrategy(ReducedReplicas):
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
        with gloo_in_order():
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
        install_peft_models(module)
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
        for own in set(module.parameters()) - of_submodels:  # as those of the models, and under other strategies
            own.data = own.data.to(stored_dtype(own, self.precision_plugin.param_dtype))
        broadcast_weights(module, self.device_mesh, apart_from=of_submodels)
        if self.config.check_replicas_every_n_steps is not None and not hasattr(module, _PREPARED):
            check_replicas_every(module, self.config.check_replicas_every_n_steps)
        setattr(module, _PREPARED, True)

    def _prepare(self, model: nn.Module) -> None:
        precision = self.precision_plugin
        axes = Axes(tp=axis(self.device_mesh, TP), data=axis(self.device_mesh, DP_REPLICATE))
        sharding = Replication(axes, self.root_device, precision.mp_policy.param_dtype)
        apply_stages(model, axes, config_for(model, self.config, tp=1), sharding, precision.param_dtype)

    @override
    def reduced_parameters(self) -> set[Tensor] | None:
        return None if self.data_size == 1 else set(self._module.parameters())


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
