"""Gives a strategy its mesh and groups, and the precision and place in which modules are built."""

import sys
from abc import abstractmethod
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerStatus
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from lightning_automodel._compat.lightning.modules import destroy_groups_at_exit, set_device_mesh
from lightning_automodel._compat.lightning.strategies import LaunchedStrategy
from lightning_automodel.distributed.kept_groups import begin_run, note_failure
from lightning_automodel.mesh import CP_TP, DP, DP_CP, TP, MeshSizes, axis, share_mesh
from lightning_automodel.parallel.guards.replica_check import check_replicas
from lightning_automodel.strategies.checkpoints.plain_files import StagedCheckpointIO
from lightning_automodel.strategies.faults.failures import is_of_backend
from lightning_automodel.strategies.faults.peers import Peers
from lightning_automodel.strategies.precision import FSDP2Precision, convert_precision
from lightning_automodel.strategies.random_state import ModelDraws, share_random_state


class OnMesh(LaunchedStrategy):
    """A strategy whose ranks form a mesh."""

    _timeout: timedelta | None  # Lightning's: of every collective

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._device_mesh: DeviceMesh | None = None
        self._groups: dict[str, ProcessGroup] = {}  # of the mesh, by axis
        self._peers = Peers()
        self._draws = ModelDraws()
        super().__init__(*args, **kwargs)

    @property
    @abstractmethod
    def sizes(self) -> MeshSizes:
        """Return the size of each axis of the mesh."""

    # ---- mesh and groups ---------------------------------------------------------------------------------------------

    @property
    def device_mesh(self) -> DeviceMesh:
        """Return the mesh of all ranks, along the axes of :mod:`lightning_automodel.mesh`.

        Raises:
            RuntimeError: before the processes have met.
        """
        if self._device_mesh is None:
            raise RuntimeError("there is no device mesh before the trainer has started its processes")
        return self._device_mesh

    @property
    def data_size(self) -> int:
        """Count the ranks that see different samples, also before the processes have met."""
        return self.sizes.dp_replicate * self.sizes.dp_shard

    @property
    def data_rank(self) -> int:
        """Return the number of the share of the samples that this rank sees, also before the processes have met."""
        return self.global_rank // (self.sizes.cp * self.sizes.tp)

    @property
    def data_group(self) -> ProcessGroup:
        """Return the ranks that hold different samples of a batch: what losses and metrics reduce over."""
        return self._group(DP)

    @property
    def gradient_group(self) -> ProcessGroup:
        """Return the ranks over which gradients are averaged."""
        return self._group(DP_CP)

    @property
    def sample_group(self) -> ProcessGroup:
        """Return the ranks that see the same samples, and compute one model together."""
        return self._group(CP_TP)

    @property
    def tp_group(self) -> ProcessGroup:
        """Return the ranks that split each layer's matrices."""
        return self._group(TP)

    def _group(self, name: str) -> ProcessGroup:
        """Look a group up once: torch makes a new mesh of the axis whenever it is asked, in 0.3 ms."""
        if name not in self._groups:
            self._groups[name] = axis(self.device_mesh, name).get_group()
        return self._groups[name]

    @property
    def _trainer(self) -> "pl.Trainer":
        return self._module.trainer

    @property
    def _callbacks(self) -> list["pl.Callback"]:
        return self._trainer.callbacks  # type: ignore[attr-defined]

    @property
    def _module(self) -> "pl.LightningModule":
        """Return the module that the user passed; ``self.model`` may wrap it, with other names of parameters."""
        assert self.lightning_module is not None
        return self.lightning_module

    def join_mesh(self) -> None:
        """Builds the mesh when the processes have met, or takes that of a trainer before. Collective."""
        destroy_groups_at_exit()
        begin_run(self.root_device)
        self._device_mesh, self._groups = share_mesh(self.sizes, self.root_device.type, self._timeout), {}
        set_device_mesh(self._module, self._device_mesh)
        share_random_state(self.sample_group)
        self._peers.start(self._timeout)

    def check_replicas(self, module: "pl.LightningModule") -> None:
        """Compares the parameters that several ranks hold whole. Collective.

        Raises:
            ValueError: naming one that differs.
        """
        check_replicas(module)

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._peers.explain(exception)
        note_failure(exception, self._step(), is_of_backend=is_of_backend(exception))
        super().on_exception(exception)

    def _step(self) -> str:
        if self.lightning_module is None:
            return ""
        trainer = self._trainer
        return f"{trainer.state.fn} {trainer.state.stage} {trainer.fit_loop.total_batch_idx}"

    def check_all_end(self) -> None:
        """Raise the exception again before callbacks save on it, unless all ranks have it: some would not take part."""
        error = sys.exception()
        is_ending = self._trainer.state.status == TrainerStatus.INTERRUPTED
        if is_ending and error is not None and not self._peers.have_all_failed(error):
            raise error

    @override
    def teardown(self) -> None:
        self._peers.stop()
        super().teardown()

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        if self._checkpoint_io is None:
            self._checkpoint_io = StagedCheckpointIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        if io is not None and hasattr(
            io, "checkpoint_io"
        ):  # such as AsyncCheckpointIO; ignored if it was given what it wraps
            io.checkpoint_io = StagedCheckpointIO()
        self._checkpoint_io = io

    # ---- precision and building --------------------------------------------------------------------------------------

    @property
    def precision_plugin(self) -> FSDP2Precision:
        """Return the plugin that ``Trainer(precision=...)`` asked for."""
        return convert_precision(self._precision_plugin)

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        # Nothing is set before the Trainer does: it takes a plugin that a strategy brings for the user's choice.
        self._precision_plugin = None if plugin is None else convert_precision(plugin)

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        # Neither a default device nor a default dtype: transformers builds on meta by itself, plain layers need real
        # weights, and buffers must keep their dtype.
        with torch.device("meta") if empty_init else torch.device("cpu"):
            yield
