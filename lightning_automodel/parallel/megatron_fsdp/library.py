"""Calls Megatron-FSDP: over which mesh it shards, and which of its hooks go."""

from functools import partial

import torch
import torch.distributed as dist
from megatron_fsdp.fully_shard import fully_shard_model
from megatron_fsdp.megatron_fsdp import MegatronFSDP
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_automodel._compat.megatron_fsdp import (
    free_behind_hooks,
    gather_for_backward,
    keep_ties,
    keep_units_gathered,
    remove_root_hooks,
    whole_rows,
)
from lightning_automodel.config import MegatronFSDPConfig
from lightning_automodel.distributed.kept_groups import keep
from lightning_automodel.distributed.logs import log
from lightning_automodel.parallel.megatron_fsdp.building import Dtypes
from lightning_automodel.parallel.megatron_fsdp.units import (
    show_outputs,
    take_outputs,
    units_in,
    watch_changed_outputs,
)

_MESH = ("dp", "tp")


@whole_rows()
def shard(
    module: nn.Module,
    dp_mesh: DeviceMesh,
    config: MegatronFSDPConfig,
    dtypes: Dtypes,
    device: torch.device,
    units: list[type[nn.Module]],
) -> MegatronFSDP:
    """Shards ``module`` over ``dp_mesh``, in place, without the library's hooks at the root; returns its wrapper."""
    mesh = _library_mesh(dp_mesh)
    outermost = units_in(module, units)
    show_outputs(outermost)
    wrapper = fully_shard_model(
        module,
        device_mesh=mesh,
        expt_device_mesh=mesh,  # it takes parameters of modules that are called experts for parts of an expert axis
        dp_shard_dim=_MESH[0],
        tp_dim=_MESH[1],
        fsdp_unit_modules=units,
        zero_dp_strategy=config.zero_dp_strategy,
        device=device,
        mixed_precision_policy=dtypes.policy(dp_mesh.size()),
        overlap_grad_reduce=config.overlap_grad_reduce,
        overlap_param_gather=config.overlap_param_gather,
        sync_model_each_microbatch=False,
        preproc_state_dict_for_dcp_ckpt=False,
        report_nan_in_param_grad=config.report_nan_in_param_grad,
        average_in_collective=config.average_in_collective,
        disable_bucketing=config.disable_bucketing,
        calculate_per_token_loss=config.calculate_per_token_loss,
        keep_fp8_transpose_cache=config.keep_fp8_transpose_cache,
        nccl_ub=config.nccl_ub,
        fsdp_double_buffer=config.fsdp_double_buffer,
    )
    take_outputs(outermost)
    free_behind_hooks(wrapper)
    keep_ties(wrapper)
    if config.zero_dp_strategy < 3:
        keep_units_gathered(wrapper)
    else:
        watch_changed_outputs(outermost, partial(gather_for_backward, wrapper))
    removed = remove_root_hooks(wrapper)
    log(f"Megatron-FSDP: {removed} hooks at the root are taken away, since begin_backward does their work")
    return wrapper


def _library_mesh(dp_mesh: DeviceMesh) -> DeviceMesh:
    """Makes the mesh that the library wants, with a tp axis of size 1: it would take plain parameters for copies."""
    alone = keep("alone", lambda: dist.new_subgroups(1)[0])
    ranks = dist.get_process_group_ranks(dp_mesh.get_group())
    mesh = torch.tensor(ranks).view(-1, 1)
    groups = [dp_mesh.get_group(), alone]
    return DeviceMesh.from_group(groups, dp_mesh.device_type, mesh=mesh, mesh_dim_names=_MESH)
