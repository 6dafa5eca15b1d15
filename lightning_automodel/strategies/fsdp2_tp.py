"""The Lightning strategy for tensor parallelism with FSDP2: hooks that call the parallelizer."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedModel
from typing_extensions import override

from lightning_automodel._compat import default_timeout, optimizers_to_device, root_mesh
from lightning_automodel.config import FSDP2Config
from lightning_automodel.loading import materialize, sharded_loading
from lightning_automodel.mesh import DP, DP_CP, TP, AutoSize, MeshSizes, axis, build_mesh, resolve_sizes
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.sharding import fsdp_roots, reshard
from lightning_automodel.states import restore_model
from lightning_automodel.strategies import checkpoints, metrics
from lightning_automodel.strategies.agreement import BatchAgreement
from lightning_automodel.strategies.compiled import uncompile
from lightning_automodel.strategies.data import check_training_lengths, install_samplers, process_dataloader
from lightning_automodel.strategies.evaluation import EvenEvaluation, disable_inference_mode
from lightning_automodel.strategies.precision import FSDP2Precision, convert_precision
from lightning_automodel.strategies.random_state import share_random_state
from lightning_automodel.strategies.units import Unit, find_units, unwrap_compiled


class FSDP2TPStrategy(ModelParallelStrategy):
    """Trains any Hugging Face model tensor-parallel and sharded by FSDP2, with the numbers of one device.

    What ``configure_model`` (or ``__init__``) builds is made parallel. The sizes multiply to the number of processes::

        dp_replicate x dp_shard x cp x tp = devices x num_nodes

    Args:
        tp: ranks that split each layer's matrices; they see the same batch.
        cp: ranks that split each sequence. Not available yet: 1.
        dp_shard: ranks that see different samples and share the parameters among them; ``"auto"``: what remains.
        dp_replicate: groups of ranks that each hold all shards (hybrid sharding).
        config: all other switches.
        save_distributed_checkpoint: a folder with a part per rank (``True``), or one plain Lightning file.
        process_group_backend: "nccl", "gloo" or one per device type; ``None``: what ``config.backend`` says.
        timeout: of every collective.

    Raises:
        ValueError: if a size is not positive, or not available.
    """

    strategy_name = "fsdp2_tp"

    def __init__(
        self,
        tp: int = 1,
        cp: int = 1,
        dp_shard: AutoSize = "auto",
        dp_replicate: int = 1,
        config: FSDP2Config | None = None,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_timeout,
    ) -> None:
        self.config = config or FSDP2Config()
        super().__init__(
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend or self.config.backend,
            timeout=timeout,
        )
        self._restoration = checkpoints.Restoration()
        self._requested = {"tp": tp, "cp": cp, "dp_shard": dp_shard, "dp_replicate": dp_replicate}
        self._check_requested()
        self._agreement = BatchAgreement()
        self._evaluation = EvenEvaluation()

    def _check_requested(self) -> None:
        fixed = {name: size for name, size in self._requested.items() if size != "auto"}
        sizes = resolve_sizes(_product(fixed), **fixed)
        if sizes.cp > 1:
            raise ValueError(f"cp={sizes.cp}: context parallelism is not available in this version; use cp=1")

    # ---- sizes, mesh and groups --------------------------------------------------------------------------------------

    @property
    def sizes(self) -> MeshSizes:
        """The size of each axis, resolved against the number of processes."""
        return resolve_sizes(self.num_nodes * self.num_processes, **self._requested)  # type: ignore[arg-type]

    @property
    def data_size(self) -> int:
        """Number of ranks that see different samples."""
        return axis(self.device_mesh, DP).size()

    @property
    def data_rank(self) -> int:
        """Which share of the samples this rank sees."""
        return axis(self.device_mesh, DP).get_local_rank()

    @property
    def data_group(self) -> ProcessGroup:
        """Ranks that hold different samples of a batch: what losses and metrics reduce over."""
        return axis(self.device_mesh, DP_CP).get_group()

    @property
    def tp_group(self) -> ProcessGroup:
        """Ranks that see the same samples."""
        return axis(self.device_mesh, TP).get_group()

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.data_size, "rank": self.data_rank}

    @override
    def _configure_launcher(self) -> None:
        _ = self.sizes  # an error here comes before any process is started
        super()._configure_launcher()

    @override
    def setup_environment(self) -> None:
        self._setup_distributed()
        if self._device_mesh is None:
            self._device_mesh = build_mesh(self.sizes, self.root_device.type)
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh
        share_random_state(self.tp_group)

    # ---- precision ---------------------------------------------------------------------------------------------------

    @property
    def precision_plugin(self) -> FSDP2Precision:
        """What ``Trainer(precision=...)`` asked for, as FSDP2 does it."""
        return convert_precision(self._precision_plugin)

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        # Nothing is set before the Trainer does: it takes a plugin that a strategy brings for the user's choice.
        self._precision_plugin = None if plugin is None else convert_precision(plugin)

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
    def teardown(self) -> None:
        if self.lightning_module is not None:
            metrics.remove_log(self.lightning_module)
        super().teardown()

    # ---- building the model ------------------------------------------------------------------------------------------

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        # Neither a default device nor a default dtype: transformers builds on meta by itself, plain layers need real
        # weights, and buffers must keep their dtype.
        with torch.device("meta") if empty_init else torch.device("cpu"):
            yield

    @contextmanager
    @override
    def model_sharded_context(self) -> Generator[None, None, None]:
        with sharded_loading(self._parallelize, self.root_device):
            yield

    def _parallelize(self, module: nn.Module) -> None:
        precision = self.precision_plugin
        config = self.config
        if not isinstance(module, PreTrainedModel):  # a layer beside the models: whole on every rank of the tp axis
            config = replace(config, tp_plan={name: "replicate" for name, _ in module.named_parameters()})
        parallelize(module, self.device_mesh, config, mp_policy=precision.mp_policy, param_dtype=precision.param_dtype)

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        disable_inference_mode(trainer)
        install_samplers(trainer, self.distributed_sampler_kwargs)
        unwrap_compiled(self.model)
        self._setup_units(find_units(self.model))
        self.model_to_device()
        metrics.reduce_metrics_over(self.model, self.data_group)
        metrics.count_samples_once(trainer, self.data_size)
        self._restoration.end_setup()
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            optimizers_to_device(self.optimizers, self.root_device)

    def _setup_units(self, units: list[Unit]) -> None:
        tp = self.sizes.tp
        if tp > 1 and not any(unit.is_pretrained for unit in units):
            raise ValueError(
                f"tp={tp}, but {type(self.lightning_module).__name__} holds no Hugging Face model with a "
                "tensor-parallel plan; use tp=1"
            )
        for unit in units:
            if unit.is_sharded:
                self._check_mesh(unit)
                continue
            self._parallelize(unit.module)
            if any(p.is_meta for p in unit.module.parameters()):
                materialize(unit.module, self.root_device)

    def _check_mesh(self, unit: Unit) -> None:
        parameter = next(unit.module.parameters())
        assert isinstance(parameter, DTensor)
        mesh = parameter.device_mesh
        if root_mesh(mesh) != self.device_mesh:
            raise ValueError(
                f"{unit.name} was made parallel on another mesh ({mesh}) than this trainer's ({self.device_mesh}); "
                "build a new LightningModule, or use the trainer that made it parallel"
            )

    # ---- data --------------------------------------------------------------------------------------------------------

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
        check_training_lengths(self._trainer.num_training_batches, self.root_device)
        self._agreement.start()

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
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    # ---- steps -------------------------------------------------------------------------------------------------------

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Within this context the backward pass keeps its gradients to itself: they are reduced with the last
        micro-batch (``defer_fsdp_grad_sync``), or at least not over the replicas.
        """
        assert self.model is not None
        roots = fsdp_roots(self.model)
        defer = self.config.defer_fsdp_grad_sync
        for root in roots:
            root.set_requires_gradient_sync(False) if defer else root.set_requires_all_reduce(False)
        try:
            yield
        finally:
            for root in roots:
                root.set_requires_gradient_sync(True) if defer else root.set_requires_all_reduce(True)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return metrics.plain_output(super().training_step(*args, **kwargs))

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self._evaluation.record("validation_step", args)
        return self._resharded(super().validation_step(*args, **kwargs))

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        self._evaluation.record("test_step", args)
        return self._resharded(super().test_step(*args, **kwargs))

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        self._evaluation.record("predict_step", args)
        return self._resharded(super().predict_step(*args, **kwargs))

    def _resharded(self, output: Any) -> Any:
        """The backward pass frees gathered parameters; evaluation has none."""
        assert self.model is not None
        reshard(self.model)
        return output

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
        assert self.model is not None
        return checkpoints.model_part(self.model, self._save_distributed_checkpoint)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        assert self.model is not None
        return checkpoints.optimizer_part(self.model, optimizer, self._save_distributed_checkpoint)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        path = Path(self.broadcast(filepath))
        io = None if self._save_distributed_checkpoint else self.checkpoint_io
        checkpoints.save(checkpoint, path, self.data_group, io, storage_options)

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        if self.is_global_zero:
            checkpoints.remove(Path(filepath), self.checkpoint_io)

    @override
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        assert self.lightning_module is not None
        path = Path(self.broadcast(checkpoint_path))
        return checkpoints.load(path, weights_only, self.lightning_module.trainer)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.model is not None
        model = self.model
        self._restoration.when_set_up(lambda: restore_model(model, checkpoint["state_dict"], strict))

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self.model is not None
        checkpoints.restore_optimizers(self.model, self.optimizers, checkpoint)
        checkpoints.restore_random_state(checkpoint, self.data_group.rank())


def _product(sizes: Mapping[str, Any]) -> int:
    product = 1
    for size in sizes.values():
        product *= size if isinstance(size, int) else 1
    return product
