"""Makes every number that is logged count each sample once: reductions over the data ranks, of plain whole tensors.

Ranks of one tensor-parallel group see the same samples, so a sum over all ranks counts them tp times. Lightning reduces
over all ranks in three places, which all end here: ``strategy.reduce``, torchmetrics, and the throughput monitor.
"""

from types import MethodType
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.nn.functional import all_gather
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from lightning_automodel._compat.lightning.modules import throughputs_of
from lightning_automodel.distributed.collectives import gather_in
from lightning_automodel.strategies.metric_states import reduce_metrics_over

_OPERATIONS = {"sum": ReduceOp.SUM, "min": ReduceOp.MIN, "max": ReduceOp.MAX, "product": ReduceOp.PRODUCT}
_MEANS = (None, "mean", "avg", ReduceOp.AVG)


def whole(value: Tensor) -> Tensor:
    """Returns a DTensor as the plain tensor that it stands for, differentiably; collective over its mesh."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def reduce(value: Tensor, group: ProcessGroup | None, operation: Any) -> Tensor:
    """Combines ``value`` over ``group`` and leaves the argument as it is.

    A mean of integers is a floating-point number: Lightning divides the sum of batch sizes by the number of ranks to
    get the mean of an epoch, and an integer there inflates it (lightning issue 21859). No barrier comes first (21487).

    Args:
        value: any shape, the same on all ranks.
        group: ``None``: all ranks.
        operation: "mean", "avg", "sum", "min", "max", "product", or a ``ReduceOp``.
    """
    is_mean = operation in _MEANS
    result = (_averaged(value) if is_mean else whole(value).detach()).clone()
    operation = ReduceOp.SUM if is_mean else _OPERATIONS.get(str(operation).lower(), operation)
    dist.all_reduce(result, op=operation, group=group)
    return result / dist.get_world_size(group) if is_mean else result


def reduce_counted(value: Tensor, group: ProcessGroup | None, operation: Any, counts: bool) -> Tensor:
    """Combines as :func:`reduce` does what ranks have that count, one of them at least.

    Args:
        value: any shape, the same on all ranks.
        group: ``None``: all ranks.
        operation: as of :func:`reduce`; others than those of its strings take all ranks.
        counts: whether this rank's value does.
    """
    if operation in _MEANS:
        share = torch.tensor(float(counts), device=value.device)
        of_all = reduce_counted(_averaged(value), group, ReduceOp.SUM, counts)
        return of_all / reduce(share, group, ReduceOp.SUM).to(of_all.dtype)
    operation = _OPERATIONS.get(str(operation).lower(), operation)
    value = whole(value)
    if not counts and operation in _OPERATIONS.values():
        value = torch.full_like(value, _neutral(operation, value.dtype))
    return reduce(value, group, operation)


def _averaged(value: Tensor) -> Tensor:
    """Return ``value`` in a dtype that means are of."""
    value = whole(value).detach()
    return value if value.is_floating_point() else value.to(torch.get_default_dtype())


def _neutral(operation: Any, dtype: torch.dtype) -> float | int:
    if operation in (ReduceOp.SUM, ReduceOp.PRODUCT):
        return int(operation == ReduceOp.PRODUCT)
    if dtype.is_floating_point:
        return float("inf") if operation == ReduceOp.MIN else -float("inf")
    limits = torch.iinfo(dtype)
    return limits.max if operation == ReduceOp.MIN else limits.min


def reduce_decision(decision: bool, device: torch.device, every: bool) -> bool:
    """Tells whether ``decision`` is true on every rank, or on any.

    Over all ranks and not the data ranks: Lightning compares the sum with the number of processes, and asks on one rank
    of each group too (which checkpoint is best, whether to stop).
    """
    if not dist.is_initialized():  # a callback of a trainer that is connected, and has not run
        return decision
    votes = torch.tensor(int(decision), device=device)
    dist.all_reduce(votes, op=ReduceOp.MIN if every else ReduceOp.MAX)
    return bool(votes)


def gather_stacked(value: Tensor, group: ProcessGroup | None, differentiable: bool) -> Tensor:
    """Gathers the values of all ranks of ``group``, stacked: shape ``[size of the group, *value.shape]``."""
    if differentiable:
        everyone: Any = group or dist.group.WORLD
        return gather_in(whole(value).unsqueeze(0), 0, everyone.size(), everyone)
    with torch.no_grad():
        return torch.stack(all_gather(whole(value).contiguous(), group))


def count_samples_once(trainer: "pl.Trainer", data_size: int) -> None:
    """Makes throughput monitors multiply a rank's samples by the data ranks, and not by all ranks.

    The operations of a batch are then those of a tensor-parallel group, which has that many times one device's speed.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ThroughputMonitor):
            for throughput in throughputs_of(callback):
                throughput.world_size = data_size
                if callback.available_flops is not None:
                    throughput.available_flops = callback.available_flops * trainer.world_size / data_size


# ---- values that must not leak ---------------------------------------------------------------------------------------


def install_log(module: "pl.LightningModule") -> None:
    """Makes ``module.log`` (and the ``log`` that Lightning gives to callbacks) take DTensors.

    A bound method on the instance: copies of the module get one of their own, found by the name ``log``, and pickling
    drops it.
    """
    module.log = MethodType(log, module)  # type: ignore[method-assign]


def remove_log(module: "pl.LightningModule") -> None:
    """Undoes :func:`install_log`."""
    vars(module).pop("log", None)


def log(self: "pl.LightningModule", name: str, value: Any, *args: Any, **kwargs: Any) -> None:
    """Calls the module's own ``log`` with plain whole tensors without a graph, and with metrics that count once."""
    if isinstance(value, Metric):  # it may have been made after ``setup``
        reduce_metrics_over(value, self.trainer.strategy.data_group)  # type: ignore[attr-defined]
    if not kwargs.get("enable_graph", False):
        value = apply_to_collection(value, Tensor, lambda tensor: whole(tensor.detach()))
    type(self).log(self, name, value, *args, **kwargs)


def plain_output(output: Any) -> Any:
    """Returns the output of ``training_step`` with DTensors (a loss above all) as plain tensors."""
    return apply_to_collection(output, DTensor, whole)
