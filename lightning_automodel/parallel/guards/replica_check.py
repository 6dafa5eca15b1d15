"""Checks that parameters which several ranks hold whole are still equal there: at checkpoints, and every few steps.

Buffers that differ (running statistics of each rank's samples) are named.
"""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_automodel._compat.torch.modules import is_persistent, own_buffers
from lightning_automodel.distributed.logs import warn_once
from lightning_automodel.distributed.replica_checksums import INTEGERS, Comparison, Replicas, checksums

Collect = Callable[[nn.Module], Iterator[Replicas]]


def replicas_of(model: nn.Module) -> Iterator[Replicas]:
    """Yield what is to be equal: DTensors over the axes that replicate them, plain parameters over all ranks."""
    found: dict[tuple[DeviceMesh, int] | None, dict[str, Tensor]] = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            for i, placement in enumerate(parameter.placements):
                if placement.is_replicate():
                    found.setdefault((parameter.device_mesh, i), {})[name] = parameter.to_local()
        else:
            found.setdefault(None, {})[name] = parameter
    for key, tensors in found.items():
        if key is None:
            axis, group = "data", dist.group.WORLD
        else:
            mesh, i = key
            axis, group = (mesh.mesh_dim_names or ("",) * mesh.ndim)[i], mesh.get_group(i)
        assert group is not None
        if group.size() > 1:
            yield Replicas(axis=axis, group=group, tensors={n: t for n, t in tensors.items() if t.numel()})


def check_replicas(model: nn.Module, collect: Collect = replicas_of) -> None:
    """Compares what ``collect`` finds, now. Collective over all ranks.

    Raises:
        ValueError: naming a parameter that differs, and the ranks.
    """
    for comparison in _begin(model, collect):
        comparison.finish()


def warn_of_buffers_apart(model: nn.Module, group: ProcessGroup) -> None:
    """Warn of buffers of a checkpoint that the ranks of ``group`` hold unlike: it has those of one. Collective."""
    held: dict[str, Any] = {
        f"{prefix}.{name}".removeprefix("."): buffer
        for prefix, module in model.named_modules()
        for name, buffer in own_buffers(module).items()
        if is_persistent(module, name) and _has_bits(buffer)
    }
    if group.size() == 1 or not held:
        return
    sums = checksums(buffer.contiguous() for buffer in held.values())
    ranks = [torch.empty_like(sums) for _ in range(group.size())]
    dist.all_gather(ranks, sums, group=group)
    differing = (torch.stack(ranks) != sums).any(0).tolist()
    names = [name for name, differs in zip(held, differing, strict=True) if differs]
    if names:
        others = f" and {len(names) - 1} more buffers" if len(names) > 1 else ""
        warn_once(
            f"{names[0]}{others} of {type(model).__name__}: the data ranks hold other values, which follow the samples "
            "of each (statistics of a BatchNorm, running means, codebooks). Evaluation uses those of each rank; the "
            "checkpoint has those of rank 0, from which all ranks go on, so a resumed run is not the same run. Compute "
            "them from all samples: in training_step, self.trainer.strategy.reduce(statistic) is the mean over the "
            "data ranks; under DDPStrategy on CUDA, Trainer(sync_batchnorm=True) does so for batch norms"
        )


def _has_bits(buffer: Tensor | None) -> bool:
    return type(buffer) is Tensor and buffer.numel() > 0 and buffer.element_size() in INTEGERS


def check_replicas_every(model: nn.Module, steps: int, collect: Collect = replicas_of) -> None:
    """Compare replicas after every so many steps of optimizers that hold parameters of ``model``, from now on.

    The result is looked at with the next step, when it has long been there. ``step()`` raises what
    :func:`check_replicas` raises.
    """
    reference, count = weakref.ref(model), 0
    waiting: list[Comparison] = []

    def hook(optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        nonlocal count
        model = reference()
        if model is None or not _holds(optimizer, model):
            return
        while waiting:
            waiting.pop().finish()
        count += 1
        if count % steps == 0:
            waiting.extend(_begin(model, collect))

    # A hook must not remove itself: torch is iterating over them.
    weakref.finalize(model, register_optimizer_step_post_hook(hook).remove)


def _begin(model: nn.Module, collect: Collect) -> list[Comparison]:
    return [Comparison(replicas) for replicas in collect(model) if replicas.tensors]


def _holds(optimizer: Optimizer, model: nn.Module) -> bool:
    own = {id(parameter) for parameter in model.parameters()}
    return any(id(p) in own for group in optimizer.param_groups for p in group["params"])
