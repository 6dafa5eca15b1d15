"""Shards a model over the data ranks with FSDP2: one unit per block, one for the rest, gathered ahead of their use."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from lightning_automodel.blocks import find_blocks, last_blocks
from lightning_automodel.config import FSDP2Config
from lightning_automodel.mesh import DP_REPLICATE, DP_SHARD_CP, axis


def apply_fsdp2(model: nn.Module, mesh: DeviceMesh, config: FSDP2Config, mp_policy: MixedPrecisionPolicy) -> None:
    """Shards ``model`` in place over ``dp_shard_cp``, and replicates the shards over ``dp_replicate``.

    Always applied, also on one data rank: every parameter is then a DTensor over the same mesh, which is what stock
    clipping and stock fused optimizers need.
    """
    mesh = fsdp_mesh(mesh)
    blocks = find_blocks(model)
    last = last_blocks(model, blocks)
    for name, block in blocks.items():
        reshard = config.reshard_after_forward
        if reshard is None:
            reshard = name not in last  # the backward pass begins with the last block: do not free it in between
        fully_shard(block, mesh=mesh, mp_policy=mp_policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=mp_policy)
    if config.enable_fsdp2_prefetch:
        set_prefetch(list(blocks.values()), config.fsdp2_forward_prefetch_depth, config.fsdp2_backward_prefetch_depth)


def fsdp_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The axes that FSDP2 works on: ``dp_shard_cp``, or ``(dp_replicate, dp_shard_cp)`` for hybrid sharding."""
    if axis(mesh, DP_REPLICATE).size() > 1:
        return axis(mesh, DP_REPLICATE, DP_SHARD_CP)
    return axis(mesh, DP_SHARD_CP)


def set_prefetch(blocks: list[nn.Module], forward_depth: int, backward_depth: int) -> None:
    """Each block asks for the next ``forward_depth`` blocks in the forward pass, and for the ``backward_depth`` before
    it in the backward pass, while it computes.
    """
    for i, block in enumerate(blocks):
        assert isinstance(block, FSDPModule)
        block.set_modules_to_forward_prefetch(_units(blocks[i + 1 : i + 1 + forward_depth]))
        block.set_modules_to_backward_prefetch(_units(blocks[max(0, i - backward_depth) : i][::-1]))


def fsdp_roots(module: nn.Module) -> list[FSDPModule]:
    """The outermost FSDP2 modules in ``module``."""
    if isinstance(module, FSDPModule):
        return [module]
    return [root for child in module.children() for root in fsdp_roots(child)]


def reshard(module: nn.Module) -> None:
    """Frees what a forward pass without a backward pass left gathered: the roots and the last blocks."""
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()


def _units(modules: list[nn.Module]) -> list[FSDPModule]:
    return [module for module in modules if isinstance(module, FSDPModule)]
