"""Checks that parameters which several ranks hold whole are still equal there: at checkpoints, and every few steps."""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_automodel.distributed.replica_checksums import Comparison, Replicas

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
