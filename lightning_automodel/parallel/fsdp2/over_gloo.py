"""What FSDP2 sends over gloo: between pairs of ranks, from where it was computed to where it is computed with.

torch copies what it sends into one buffer, and what it receives out of another. On CPU that takes as long as the
messages, and the system hands out buffers of that size page by page: of a step of two data ranks a quarter was that.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_automodel._compat.fsdp2.gathers import gather_by
from lightning_automodel._compat.fsdp2.scatters import scatter_by
from lightning_automodel._compat.fsdp2.units import fsdp_units
from lightning_automodel.distributed.pairwise import all_gather, goes_over_gloo, reduce_scatter
from lightning_automodel.parallel.freed_memory import from_what_was_freed


def communicate_over_gloo(model: nn.Module, mesh: DeviceMesh) -> None:
    """Make the units of ``model`` exchange between pairs of ranks, where their last axis goes over gloo."""
    if mesh.device_type != "cpu" or not goes_over_gloo(mesh.get_group(mesh.ndim - 1)):
        return
    for unit in fsdp_units(model):
        gather_by(unit, all_gather, from_what_was_freed)
        scatter_by(unit, reduce_scatter)
