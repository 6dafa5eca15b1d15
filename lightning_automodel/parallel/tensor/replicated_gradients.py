"""Checks once that a parameter which is whole on every tp rank has the same gradient on every one of them.

What a plan leaves whole, and what meets slices outside of a boundary child, has a partial gradient, which only a style
can say (``replicated_with_grad_allreduce``). Where nobody compared a plan with one process, the first step tells.
"""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_automodel.gradients import to_local_if_dtensor
from lightning_automodel.plans.selection import wildcard

_OF_RANK = "_gradients_of_this_rank_alone"
_NOISE = 1e-6  # of the norm of all gradients: a gradient that is zero by construction is of this size


def compare_first_gradients(model: nn.Module, tp_mesh: DeviceMesh) -> None:
    """Compares, after the first step of an optimizer of ``model``, gradients that ``tp_mesh`` should share.

    The step raises a ``ValueError`` that names a parameter whose gradients differ, and what may be the cause.
    """
    reference, (axis,) = weakref.ref(model), tp_mesh.mesh_dim_names or ("tp",)
    compared = False

    def hook(optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        nonlocal compared
        model = None if compared else reference()
        if model is None:
            return
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        gradients = {
            name: to_local_if_dtensor(p.grad)
            for name, p in model.named_parameters()
            if id(p) in held and p.grad is not None and _is_whole(p, axis)
        }
        if gradients:
            compared = True
            noted = dict(model.__dict__.get(_OF_RANK, {}))
            model.__dict__.get(_OF_RANK, {}).clear()
            _compare(gradients, tp_mesh)
            if noted:
                _refuse_equal(noted, tp_mesh)

    # A hook must not remove itself: torch is iterating over them.
    weakref.finalize(model, register_optimizer_step_post_hook(hook).remove)


def noting(model: nn.Module, name: str) -> Callable[[Tensor], None]:
    """Return what notes gradients of the parameter ``name``, of which a plan says that they are partial sums, up to the
    first step.
    """
    noted: dict[str, Tensor] = model.__dict__.setdefault(_OF_RANK, {})
    noted[name] = torch.zeros(2)

    def note(gradient: Tensor) -> None:
        if name in noted:
            noted[name] = noted[name].to(gradient.device) + _norm_and_sum(gradient)

    return note


def _refuse_equal(noted: dict[str, Tensor], tp_mesh: DeviceMesh) -> None:
    """Raise an error if what should be terms of a sum is the same on all ranks."""
    found = torch.stack([x.to(tp_mesh.device_type) for x in noted.values()])
    ranks = [torch.empty_like(found) for _ in range(tp_mesh.size())]
    dist.all_gather(ranks, found, group=tp_mesh.get_group())
    every = torch.stack(ranks)
    spread, norm = (every.amax(0) - every.amin(0)).amax(-1), every[..., 0].amax(0)
    equal = (spread <= _NOISE * norm) & (norm > 0)
    for name, is_equal in zip(noted, equal.tolist(), strict=True):
        if is_equal:
            raise ValueError(
                f"{name} has the style replicated_with_grad_allreduce, but its gradients are the same on all "
                f"{tp_mesh.size()} tp ranks before they are summed: it works on whole values, and the sum is "
                f"{tp_mesh.size()} times its gradient. Take {wildcard(name.rpartition('.')[0] or name)!r} out of the "
                "tensor-parallel plan"
            )


def _is_whole(parameter: nn.Parameter, axis: str) -> bool:
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    return axis in names and parameter.placements[names.index(axis)].is_replicate()


def _compare(gradients: Mapping[str, Tensor], tp_mesh: DeviceMesh) -> None:
    found = torch.stack([_norm_and_sum(g) for g in gradients.values()])
    size = found.new_tensor([max(g.numel(), 1) for g in gradients.values()]).sqrt()
    ranks = [torch.empty_like(found) for _ in range(tp_mesh.size())]
    dist.all_gather(ranks, found, group=tp_mesh.get_group())
    every = torch.stack(ranks)  # [ranks, parameters, norm and sum]
    spread = every.amax(0) - every.amin(0)
    norm = every[..., 0].amax(0)
    error = torch.maximum(spread[:, 0], spread[:, 1] / size) / norm.clamp(min=_NOISE * norm.norm().item() + 1e-30)
    precise = all(g.dtype == torch.float32 for g in gradients.values())
    worst = int(error.argmax())
    if error[worst] > (1e-3 if precise else 5e-2):
        name = list(gradients)[worst]
        raise ValueError(
            f"{name} is whole on every tp rank, but their gradients differ by {error[worst].item():.1%} (norms "
            f"{', '.join(f'{x:.4g}' for x in every[:, worst, 0].tolist())}). If it works on slices, between a column "
            f"and a row style, give {wildcard(name.rpartition('.')[0] or name)!r} the style "
            "'replicated_with_grad_allreduce'; if not, what is drawn at random differs between the ranks, or a module "
            "uses the matrix of a split one without calling it"
        )


def _norm_and_sum(gradient: Tensor) -> Tensor:
    """Computes norm and sum in float32 without a copy of the gradient: it may be that of a whole embedding."""
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient.resolve_conj())
    if gradient.dtype == torch.float64:  # torch measures no tensor in a narrower dtype than its own
        gradient = gradient.float()
    norm = torch.linalg.vector_norm(gradient, dtype=torch.float32)
    return torch.stack([norm, gradient.sum(dtype=torch.float32)])
