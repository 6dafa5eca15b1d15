"""Models that Megatron-FSDP shards: what is called around forward passes, backward passes and steps.

The library's wrapper is not in the module tree, so names stay; it is told by hooks what it would see as a wrapper::

    begin_forward              parameters that the optimizer has changed become those that compute
    begin_backward             clears what zero_grad cleared; says whether this micro-batch ends the window
    end_backward               the window's end: gradients are reduced, parameters become those that the optimizer has
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from lightning_automodel._compat.megatron_fsdp import (
    use_parameters_of_optimizer,
    use_raw_parameters,
)
from lightning_automodel._compat.tensors import version_of
from lightning_automodel.config import MegatronFSDPConfig
from lightning_automodel.distributed.boxes import Box, boxes_at
from lightning_automodel.distributed.logs import log
from lightning_automodel.distributed.replica_checksums import Replicas
from lightning_automodel.distributed.uneven_shards import Partition, set_partition
from lightning_automodel.gradients import scale_
from lightning_automodel.parallel.megatron_fsdp.building import Dtypes
from lightning_automodel.parallel.megatron_fsdp.library import shard, unit_classes
from lightning_automodel.parallel.megatron_fsdp.plain import slice_of, sum_over_tp


class ShardedModules:
    """Modules that the library shards together.

    Attributes:
        units: classes of modules that are gathered and freed as one.
        trained: the parameters that compute, and have gradients.

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
        for name, found in slices.items():
            if found is not None and found.is_partial and self.wrapper.raw_param[name].requires_grad:
                sum_over_tp(self.wrapper.raw_param[name], tp_mesh.get_group())
        self._parameters = dict(self.wrapper.param_and_grad_buffer.optimizer_named_parameters)
        self._trained = self._trained_now()
        self._whole = [n for n in self._parameters if (s := slices[n]) is None or s.placement.is_replicate()]
        starts = self._describe(slices)
        if dtypes.main is not None:
            self._keep_originals({f"{i}.{n}": v for i, each in enumerate(originals) for n, v in each.items()}, starts)
        self.units = tuple(units)
        self.trained = [p for p in self.wrapper.raw_param.values() if p.requires_grad]
        self._window_is_closed = self._is_outdated = True
        self._writes_seen = 0
        shape = f"dp={dp_mesh.size()} x tp={tp_mesh.size()}"
        log(f"Megatron-FSDP shards {len(modules)} modules over {shape}, ZeRO stage {config.zero_dp_strategy}, {dtypes}")

    # ---- forward and backward ----------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """Puts the parameters that compute in place, with the values that those of the optimizer have now."""
        if self.wrapper.is_param_fsdp_distributed:
            if self._is_outdated or self._writes() != self._writes_seen:
                # Whoever changed the optimizer's parameters (a step, a checkpoint, an average): those that compute
                # follow.
                self.wrapper.install_optimized_model_weights()
                self.wrapper.synchronize_param_gather()
                self._is_outdated = False
            use_raw_parameters(self.wrapper)

    def end_forward(self, is_trained: bool) -> None:
        """Puts the parameters of the optimizer in place, where others are freed or what is written into them is lost.

        Args:
            is_trained: a backward pass may follow, in which parameters that are not freed have gradients.
        """
        if self.config.zero_dp_strategy == 3 or not is_trained:
            self._use_those_of_optimizer()

    def begin_backward(self, is_last: bool) -> None:
        """Prepares the library for a backward pass.

        Args:
            is_last: this micro-batch ends the window, so gradients are to be reduced.

        Raises:
            ValueError: if gradients of an earlier window are left, and the stage cannot add to them; or if a parameter
                was frozen or unfrozen since it was sharded.
        """
        if self._window_is_closed:
            self._refuse_changes_of_what_trains()
            self._follow_zero_grad()
        self._window_is_closed = False
        use_raw_parameters(self.wrapper)
        self.wrapper.is_last_microbatch = is_last
        # The library's own hook stands on outputs that are tensors, tuples or lists.
        self.wrapper.pre_backward()

    def end_backward(self) -> None:
        """Finishes a backward pass of the library."""
        self.wrapper.post_backward()
        self._is_outdated = True  # from the next step on
        if self.wrapper.is_last_microbatch:
            self.wrapper.finish_grad_sync()
            self._window_is_closed = True
            if self.config.check_for_nan_in_grad:
                self._check_finite()
        else:
            self._use_those_of_optimizer()

    def _use_those_of_optimizer(self) -> None:
        use_parameters_of_optimizer(self.wrapper)
        self._writes_seen = self._writes()

    def _writes(self) -> int:
        """Count writes to the optimizer's parameters, but those by ``parameter.data``, which torch does not count."""
        return sum(version_of(p) + version_of(_local(p.detach())) for p in self._parameters.values())

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
                "which has gradients only for what trained then; freeze in configure_model and leave it so, or use "
                "FSDP2TPStrategy, which follows"
            )

    def _follow_zero_grad(self) -> None:
        """Clear the library's buffers of gradients, which ``zero_grad`` of an optimizer does not know."""
        left = [p for p in self._parameters.values() if p.grad is not None]
        if left and not any(bool(_local(p.grad).any()) for p in left):
            left = []  # zero_grad(set_to_none=False)
        if not left:
            self.wrapper.zero_grad_buffer()
            return
        if self.config.zero_dp_strategy < 2:
            raise ValueError(
                "a backward pass begins with gradients that were reduced already, to which zero_dp_strategy="
                f"{self.config.zero_dp_strategy} cannot add; call self.zero_grad() between optimizer steps, put all "
                "micro-batches of a step but the last in `with self.trainer.strategy.block_backward_sync():`, or use "
                "stage 2 or 3"
            )
        self._clear(name for name, p in self._parameters.items() if p.grad is None)

    def _clear(self, names: Iterable[str]) -> None:
        buffers = self.wrapper.param_and_grad_buffer
        for name in names:
            raw = self.wrapper.raw_param[name]
            group = buffers.parameter_groups[buffers.param_to_param_group[raw]]
            if group.main_grad_buffer is not None:
                item = group.main_grad_buffer.param_idx[raw]
                group.main_grad_buffer.get_item(item, only_shard=True).zero_()

    def _check_finite(self) -> None:
        if not torch.isfinite(self.total_norm(self._parameters.values())):
            raise ValueError(
                "a gradient is NaN or infinite; look for the first loss that is, or set "
                "MegatronFSDPConfig(check_for_nan_in_grad=False) to go on all the same"
            )

    def after_evaluation(self) -> None:
        """Frees what forward passes without a backward pass left gathered; parameters are those of the optimizer."""
        self.wrapper.synchronize_param_gather()
        self._is_outdated = True

    def replicas(self, _: nn.Module) -> Iterator[Replicas]:
        """Yield what is to be equal over tp (cut differently over dp, perhaps), and without sharding over dp."""
        is_sharded, data = self.config.zero_dp_strategy > 0, self._dp_mesh.get_group()
        tensors = {name.partition(".")[2]: _local(p) for name, p in self._parameters.items() if name in self._whole}
        if self._tp_mesh.size() > 1:
            shards_over = data if is_sharded else None
            yield Replicas(axis="tp", group=self._tp_mesh.get_group(), tensors=tensors, shards_over=shards_over)
        if not is_sharded and data.size() > 1:
            own = {name.partition(".")[2]: _local(p) for name, p in self._parameters.items()}
            yield Replicas(axis="dp", group=data, tensors=own)

    # ---- gradients ---------------------------------------------------------------------------------------------------

    def total_norm(self, parameters: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
        """Computes the norm of all gradients taken as one vector, each element once: a float32 scalar. Collective.

        Ranks may hold no gradient at all, so every rank takes part whatever it holds.
        """
        device = torch.device(self._dp_mesh.device_type)
        total = torch.zeros((), device=device)
        for parameter in parameters:
            if parameter.grad is not None:
                power = _local(parameter.grad).float().norm(norm_type) ** norm_type
                total = total + power / self._copies[parameter]
        dist.all_reduce(total)
        return total ** (1 / norm_type)

    def clip(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        """Scales gradients in place so that their norm is at most ``max_norm``; returns the norm before."""
        parameters = list(parameters)
        norm = self.total_norm(parameters)
        scale_((p.grad for p in parameters if p.grad is not None), torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    # ---- which rank holds what ---------------------------------------------------------------------------------------

    def _keep_originals(self, originals: dict[str, Tensor], starts: dict[str, int]) -> None:
        """Restore the optimizer's parameters from wide originals: they were made from narrow ones, and lost digits."""
        for name, value in originals.items():
            local = _local(self._parameters[name].detach())
            local.copy_(value[starts[name] : starts[name] + _rows(local)])

    def _describe(self, slices: dict[str, Any]) -> dict[str, int]:
        """Tells checkpoints where each parameter's rows are, and returns where this rank's begin. Collective."""
        mine = {name: _rows(p) for name, p in self._parameters.items()}
        rows = _gather(_gather(mine, self._dp_mesh), self._tp_mesh)  # by place on tp, on dp, and name
        self._ranks = _gather(dist.get_process_group_ranks(self._tp_mesh.get_group()), self._dp_mesh)
        self._copies: dict[Tensor, int] = {}
        for name, parameter in self._parameters.items():
            found = slices[name]
            shape = found.shape if found else self.wrapper.raw_param[name].shape
            placement = found.placement if found else Replicate()
            partition = self._partition(
                torch.Size(shape), placement, [[each[name] for each in by_dp] for by_dp in rows]
            )
            set_partition(parameter, partition)
            self._copies[parameter] = partition.copies
        own = rows[self._tp_mesh.get_local_rank()]
        before = own[: self._dp_mesh.get_local_rank()] if self.config.zero_dp_strategy > 0 else []
        return {name: sum(each[name] for each in before) for name in self._parameters}

    def _partition(self, shape: torch.Size, placement: Any, rows: list[list[int]]) -> Partition:
        tp, dp = self._tp_mesh.size(), self._dp_mesh.size()
        by_tp = [boxes_at(shape, (tp,), (placement,), (i,)) for i in range(tp)]
        is_sharded = self.config.zero_dp_strategy > 0
        starts = [[sum(by_dp[:i]) if is_sharded else 0 for i in range(dp)] for by_dp in rows]
        parts = {
            (d, t): [cut for box in by_tp[t] if (cut := _cut(box, starts[t][d], rows[t][d]))]
            for d in range(dp)
            for t in range(tp)
        }
        ranks = self._ranks
        tp_once = [0] if placement.is_replicate() else range(tp)
        dp_once = range(dp) if is_sharded else [0]
        d, t = self._dp_mesh.get_local_rank(), self._tp_mesh.get_local_rank()
        copies, index = 1, 0
        if placement.is_replicate():
            copies, index = tp, t
        if not is_sharded:
            copies, index = copies * dp, index * dp + d
        return Partition(
            shape=shape,
            mine=parts[d, t],
            holders=[(ranks[i][j], parts[i, j]) for i in dp_once for j in tp_once],
            copies=copies,
            index=index,
        )


def _gather(value: Any, mesh: DeviceMesh) -> list[Any]:
    """Gathers what each rank of an axis passes, in order. Collective."""
    values: list[Any] = [None] * mesh.size()
    dist.all_gather_object(values, value, group=mesh.get_group())
    return values


def _local(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _rows(parameter: Tensor) -> int:
    local = _local(parameter.detach())
    return local.shape[0] if local.numel() and local.ndim else 0


def _cut(box: Box, start: int, count: int) -> Box | None:
    """Cuts a box to ``count`` rows of the rank's slice, from row ``start`` on."""
    first = max(box.local_offsets[0], start)
    last = min(box.local_offsets[0] + box.sizes[0], start + count)
    if first >= last:
        return None
    return Box(
        offsets=(box.offsets[0] + first - box.local_offsets[0], *box.offsets[1:]),
        local_offsets=(first - start, *box.local_offsets[1:]),
        sizes=(last - first, *box.sizes[1:]),
    )
