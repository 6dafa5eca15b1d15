"""Models that Megatron-FSDP shards: what is called around forward passes, backward passes and steps.

The library's wrapper is not in the module tree, so names stay; it is told by hooks what it would see as a wrapper::

    begin_forward              parameters that the optimizer has changed become those that compute
    begin_backward             clears what zero_grad cleared; says whether this micro-batch ends the window
    end_backward               the window's end: gradients are reduced, parameters become those that the optimizer has
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_automodel._compat.dtensor.tensors import count_writes_through_data, writes_into
from lightning_automodel._compat.megatron_fsdp import (
    abandon_pass,
    use_parameters_of_optimizer,
    use_raw_parameters,
)
from lightning_automodel.config import MegatronFSDPConfig
from lightning_automodel.distributed.logs import log
from lightning_automodel.distributed.replica_checksums import Replicas
from lightning_automodel.gradients import to_local_if_dtensor
from lightning_automodel.parallel.megatron_fsdp.building import Dtypes
from lightning_automodel.parallel.megatron_fsdp.library import shard
from lightning_automodel.parallel.megatron_fsdp.norms import Norms
from lightning_automodel.parallel.megatron_fsdp.order import Calls, ReductionsInOrder
from lightning_automodel.parallel.megatron_fsdp.partitions import (
    count_rows,
    describe_shards,
    refuse_operations,
    refuse_reductions,
)
from lightning_automodel.parallel.megatron_fsdp.places import Places
from lightning_automodel.parallel.megatron_fsdp.plain import Slice, slice_of, sum_over_tp
from lightning_automodel.parallel.megatron_fsdp.units import unit_classes
from lightning_automodel.parallel.megatron_fsdp.widening import widen_frozen
from lightning_automodel.parallel.megatron_fsdp.windows import WindowGradients


class ShardedModules:
    """Modules that the library shards together.

    Attributes:
        units: classes of modules that are gathered and freed as one.
        trained: the parameters that compute, and have gradients.
        norms: of what the optimizer has.
        places: of the parameters, where nobody may put other tensors.

    Args:
        modules: called as a whole each; plain parameters, real values.
        dp_mesh: one axis: ranks that share the parameters.
        tp_mesh: one axis: ranks that hold slices of matrices, see ``make_plain``.
        config: the switches.
        dtypes: of compute, main parameters and reduction.
        device: where parameters go.
        originals: for each module, values of parameters before they were cast to the dtype of compute, by name.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        dp_mesh: DeviceMesh,
        tp_mesh: DeviceMesh,
        config: MegatronFSDPConfig,
        dtypes: Dtypes,
        device: torch.device,
        originals: Sequence[dict[str, Tensor]] = (),
    ) -> None:
        self.config = config
        self._dp_mesh, self._tp_mesh = dp_mesh, tp_mesh
        container = nn.ModuleDict({str(i): module for i, module in enumerate(modules)})
        slices = {name: slice_of(p) for name, p in container.named_parameters()}
        units = unit_classes(container, config.megatron_fsdp_unit_modules)
        self.wrapper = shard(container, dp_mesh, config, dtypes, device, units)
        wide = {f"{i}.{name}": value for i, each in enumerate(originals) for name, value in each.items()}
        self._widened = [] if dtypes.main is None else widen_frozen(self.wrapper, wide, dtypes.main)
        self._reductions = ReductionsInOrder(self.wrapper)
        self._sum_partial_gradients(slices)
        self._parameters = dict(self.wrapper.param_and_grad_buffer.optimizer_named_parameters)
        self._follow_changes(container)
        self._trained = self._trained_now()
        self._whole = [n for n in self._parameters if (s := slices[n]) is None or s.placement.is_replicate()]
        self._mesh = next(p.device_mesh for p in self._parameters.values() if isinstance(p, DTensor))
        refuse_operations(self._mesh, dp_mesh.size(), tp_mesh.size())
        starts, copies = describe_shards(
            self._parameters, slices, self.wrapper.raw_param, dp_mesh, tp_mesh, config.zero_dp_strategy > 0
        )
        if tp_mesh.size() > 1:
            cut = self._parameters.keys() - set(self._whole)
            refuse_reductions(self._mesh, {self._parameters[name].shape for name in cut})
        self.norms = Norms(self._parameters, copies, self._mesh, tp_mesh.size())
        if dtypes.main is not None:
            self._keep_originals(wide, starts)
        self.units = tuple(units)
        gathered = container.named_modules() if self.frees_units else ()
        calls = Calls((name.partition(".")[2], m) for name, m in gathered if isinstance(m, self.units))
        self.trained = [p for p in self.wrapper.raw_param.values() if p.requires_grad]
        self._window = WindowGradients(self.wrapper, self._parameters, config, self.norms, calls)
        self._is_outdated = True
        self._writes_seen = self._writes()
        shape = f"dp={dp_mesh.size()} x tp={tp_mesh.size()}"
        log(f"Megatron-FSDP shards {len(modules)} modules over {shape}, ZeRO stage {config.zero_dp_strategy}, {dtypes}")

    def _follow_changes(self, container: nn.Module) -> None:
        """Note where parameters hang, while nothing of the user's is there, and count what is written into them."""
        self.places = Places(container, self.wrapper.raw_param, self._parameters)
        for parameter in self._parameters.values():
            count_writes_through_data(parameter)

    def _sum_partial_gradients(self, slices: Mapping[str, Slice | None]) -> None:
        for name, found in slices.items():
            if found is not None and found.is_partial and self.wrapper.raw_param[name].requires_grad:
                sum_over_tp(self.wrapper.raw_param[name], self._tp_mesh.get_group())

    # ---- forward and backward ----------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """Puts the parameters that compute in place, with the values that those of the optimizer have now.

        Raises:
            ValueError: if a backward pass may follow, and a parameter was frozen or unfrozen since it was sharded, of
                which those that compute do not know.
        """
        if torch.is_grad_enabled():
            self._refuse_changes_of_what_trains()
        self._show_changes()
        if self._is_outdated:
            # Whoever changed the optimizer's parameters (a step, a checkpoint, an average): those that compute follow.
            self.wrapper.install_optimized_model_weights()
            for widened in self._widened:
                widened.install()
            self._await_gathers()
            self.wrapper.synchronize_param_gather()
            self._is_outdated = False
        if self.wrapper.is_param_fsdp_distributed:
            self._compute_with_raw()
            # The library gathers what belongs to a module when that is called. Whoever reads parameters of one that is
            # not (a ParameterDict, which has peft's adapters of embeddings) would compute with stale memory; and ranks
            # call layers that samples choose (experts) in different orders.
            self.wrapper.all_gather_and_wait_parameters_ready(
                self._gathered_at_once, prefetch=False, wait_bucket_ready=self.frees_units
            )

    def end_forward(self, is_trained: bool) -> None:
        """Puts the parameters of the optimizer in place, where others are freed or what is written into them is lost.

        Args:
            is_trained: a backward pass may follow, in which parameters that are not freed have gradients.
        """
        if self.frees_units or not is_trained:
            use_parameters_of_optimizer(self.wrapper)

    def begin_backward(self, is_last: bool) -> None:
        """Prepares the library for a backward pass.

        Args:
            is_last: this micro-batch ends the window, so gradients are to be reduced.

        Raises:
            ValueError: if a parameter was frozen or unfrozen since it was sharded, or what a pass has left that an
                exception ended was not cleared.
        """
        self._refuse_changes_of_what_trains()
        self._show_changes()
        self._window.begin_backward()
        self._compute_with_raw()
        self.wrapper.is_last_microbatch = is_last
        self._reductions.begin()
        # The library's own hook stands on outputs that are tensors, tuples or lists.
        self.wrapper.pre_backward()

    def end_backward(self) -> None:
        """Finishes a backward pass of the library."""
        self.wrapper.post_backward()
        self._is_outdated = True  # from the next step on
        if self.wrapper.is_last_microbatch:
            self._await_gathers()
            self.wrapper.finish_grad_sync()
            self._window.end()
        else:
            use_parameters_of_optimizer(self.wrapper)

    def abandon(self) -> None:
        """Begin anew behind a backward pass that an exception has ended."""
        abandon_pass(self.wrapper)
        self._window.abandon()
        self._is_outdated = True

    @property
    def stepped(self) -> list[nn.Parameter]:
        """Parameters that only the optimizer has, and others compute for."""
        computing = {id(p) for p in self.wrapper.raw_param.values()}
        return [p for p in self._parameters.values() if p.requires_grad and id(p) not in computing]

    @property
    def frees_units(self) -> bool:
        """Tell whether parameters of units are there within these only."""
        return self.config.zero_dp_strategy == 3

    @cached_property
    def _gathered_at_once(self) -> list[Tensor]:
        """Parameters that compute and are gathered in one order before a forward pass: all that no unit frees."""
        named = self.wrapper.raw_param.items()
        if not self.frees_units:
            return [p for _, p in named]
        units = [f"{name}." for name, module in self.wrapper.module.named_modules() if isinstance(module, self.units)]
        return [p for name, p in named if not name.startswith(tuple(units))]

    def _compute_with_raw(self) -> None:
        use_raw_parameters(self.wrapper)
        self.places.put_raw()

    def _await_gathers(self) -> None:
        """Wait for what was gathered and no module that was called has waited for: the library would warn."""
        pipeline = self.wrapper.all_gather_pipeline
        for bucket, is_backward in list(pipeline.param_gather_event_map):
            pipeline.wait_bucket_ready(bucket, is_backward)

    def _writes(self) -> list[int]:
        """Count writes to the optimizer's parameters."""
        return list(map(writes_into, self._parameters.values()))

    def _show_changes(self) -> None:
        """Let autograd see which parameters of the optimizer were written into: it knows those that compute, and a
        backward pass through what a graph computed before would compute with the values behind it.
        """
        seen, self._writes_seen = self._writes_seen, self._writes()
        if seen == self._writes_seen:
            return
        self._is_outdated = True
        for name, before, now in zip(self._parameters, seen, self._writes_seen, strict=True):
            if before != now:
                increment_version(self.wrapper.raw_param[name])

    def _trained_now(self) -> set[tuple[str, str]]:
        """Name what trains, among the parameters that compute and among those that the optimizer has."""
        held = {"computes": self.wrapper.raw_param, "steps": self._parameters}
        return {(name, use) for use, kind in held.items() for name, p in kind.items() if p.requires_grad}

    def _refuse_changes_of_what_trains(self) -> None:
        """The library makes buffers of gradients for what trains when it shards, and looks at nothing else."""
        changed = self._trained ^ self._trained_now()
        if changed:
            name = min(changed)[0].partition(".")[2]  # behind the number of the module
            raise ValueError(
                f"{name} was {'frozen' if changed & self._trained else 'unfrozen'} after Megatron-FSDP had sharded it, "
                "which has gradients only for what trained then; freeze in configure_model and leave it so (what is "
                "only read, within torch.no_grad()), or use FSDP2TPStrategy, which follows"
            )

    def after_evaluation(self) -> None:
        """Frees what forward passes without a backward pass left gathered; parameters are those of the optimizer."""
        self._await_gathers()
        self.wrapper.synchronize_param_gather()
        self._is_outdated = True

    def replicas(self, _: nn.Module) -> Iterator[Replicas]:
        """Yield what is to be equal over tp (cut differently over dp, perhaps), and without sharding over dp."""
        is_sharded, data = self.config.zero_dp_strategy > 0, self._dp_mesh.get_group()
        tensors = {
            name.partition(".")[2]: to_local_if_dtensor(p)
            for name, p in self._parameters.items()
            if name in self._whole
        }
        if self._tp_mesh.size() > 1:
            shards_over = data if is_sharded else None
            yield Replicas(axis="tp", group=self._tp_mesh.get_group(), tensors=tensors, shards_over=shards_over)
        if not is_sharded and data.size() > 1:
            own = {name.partition(".")[2]: to_local_if_dtensor(p) for name, p in self._parameters.items()}
            yield Replicas(axis="dp", group=data, tensors=own)

    def _keep_originals(self, originals: dict[str, Tensor], starts: dict[str, int]) -> None:
        """Restore the optimizer's parameters from wide originals: they were made from narrow ones, and lost digits."""
        for name, value in originals.items():
            local = to_local_if_dtensor(self._parameters[name].detach())
            local.copy_(value[starts[name] : starts[name] + count_rows(local)])
