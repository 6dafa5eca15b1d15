"""The FSDP2 units of experts: gathered over fewer ranks than all else, stored under the label of all else."""

from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from lightning_automodel._compat.fsdp2.units import gather_unwatched, relabel
from lightning_automodel._compat.torch.modules import own_parameters
from lightning_automodel.mesh import Axes
from lightning_automodel.modules.wrappers import unwrapped
from lightning_automodel.parallel.experts import experts_of_rank
from lightning_automodel.parallel.fsdp2.shard_unit import shard_unit


def find_expert_units(model: nn.Module) -> dict[str, nn.Module]:
    """Find the modules whose experts were divided, with their adapters around them, by name."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if experts_of_rank(module) is not None and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
    return found


def parameters_of_units(units: Mapping[str, nn.Module]) -> set[nn.Parameter]:
    """Collect the divided parameters; those of adapters are whole, and belong to the block."""
    return {p for unit in units.values() for p in _stacked(unit)}


def shard_experts(
    units: Mapping[str, nn.Module],
    axes: Axes,
    mp_policy: MixedPrecisionPolicy,
    in_float32: set[nn.Parameter],
    offload: OffloadPolicy,
    freed: Mapping[str, bool | int | None],
) -> None:
    """Shard each of ``units`` over ``axes.experts.data``, and let its parameters say that they lie over ``axes.data``.

    That is so: chunk r of all experts is on data rank r. To be called after the blocks around them were sharded.
    ``freed`` says of each whether it is freed after its forward pass, as the block around it is.
    """
    assert axes.experts is not None
    mesh: DeviceMesh = axes.experts.data
    for name, unit in units.items():
        reshard = freed[name]
        if reshard is not None and not isinstance(reshard, bool) and mesh.size(mesh.ndim - 1) % reshard:
            reshard = True  # groups of so many ranks are for those that gather all else
        stacked, of_rank = _stacked(unit), experts_of_rank(unit)
        assert of_rank is not None
        others = [p for p in unit.parameters() if all(p is not mine for mine in stacked)]
        shard_unit([unit], stacked, mesh, mp_policy, in_float32, reshard, offload, replicated=others)
        relabel(unit, axes.data, axes.tp, of_rank.number)
        gather_unwatched(unit)


def experts_inside(unit: Mapping[str, nn.Module], experts: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Find the units of experts inside of a unit of blocks."""
    return {name: module for name, module in experts.items() if any(name.startswith(f"{block}.") for block in unit)}


def _stacked(unit: nn.Module) -> list[nn.Parameter]:
    of_rank = experts_of_rank(unit)
    assert of_rank is not None
    return [p for name in of_rank.stacked if (p := own_parameters(unwrapped(unit))[name]) is not None]
