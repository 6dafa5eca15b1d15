"""Finds room for parameters that no submodel holds: DTensors that each rank holds whole, where the plain ones hung."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from lightning_automodel._compat.torch.modules import hooks_after_accumulation, own_parameters
from lightning_automodel.loading.broadcast import broadcast
from lightning_automodel.loading.initialize import stored_dtype


@dataclass(frozen=True)
class Place:
    """Where a parameter hangs that no submodel holds."""

    owner: nn.Module
    name: str
    path: str

    @property
    def parameter(self) -> Tensor | None:
        """Return what hangs there now."""
        return own_parameters(self.owner).get(self.name)


def hold_whole(places: Sequence[Place], mesh: DeviceMesh, device: torch.device, dtype: torch.dtype) -> None:
    """Put DTensors at ``places``, with the values of rank 0 on each rank of ``mesh``. Collective.

    Args:
        places: of plain parameters, or of DTensors: those that each rank of ``mesh`` holds whole stay, and a part of
            one (what was made of a sharded weight, say) is gathered.
        mesh: of all other parameters.
        device: on which they lie.
        dtype: of floating-point parameters (:func:`stored_dtype`).

    Raises:
        ValueError: naming a parameter without values.
    """
    made: dict[Tensor, nn.Parameter] = {}
    for place in places:
        parameter = place.parameter
        if parameter is None or _is_whole(parameter, mesh):
            continue
        if parameter.is_meta:
            raise ValueError(
                f"{place.path} is on the meta device, and no file or initialization gives a parameter beside models "
                "its values; make it outside of torch.device('meta')"
            )
        if parameter not in made:
            made[parameter] = _replicated(parameter, mesh, device, dtype)
        own_parameters(place.owner)[place.name] = made[parameter]


def _is_whole(parameter: Tensor, mesh: DeviceMesh) -> bool:
    if not isinstance(parameter, DTensor) or parameter.device_mesh != mesh:
        return False
    return all(placement.is_replicate() for placement in parameter.placements)


def _replicated(parameter: Tensor, mesh: DeviceMesh, device: torch.device, dtype: torch.dtype) -> nn.Parameter:
    whole = parameter.detach()
    whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
    values = whole.to(device, stored_dtype(parameter, dtype)).contiguous()
    broadcast(values, mesh)
    stored = DTensor.from_local(values, mesh, [Replicate()] * mesh.ndim, run_check=False)
    new = nn.Parameter(stored, requires_grad=parameter.requires_grad)
    new.__dict__.update(parameter.__dict__)
    for hook in hooks_after_accumulation(parameter):  # type: ignore[arg-type]
        new.register_post_accumulate_grad_hook(hook)
    return new
