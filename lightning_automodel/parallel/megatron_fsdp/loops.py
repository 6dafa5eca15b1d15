"""What a loop of one's own needs of Megatron-FSDP."""

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_automodel.config import MegatronFSDPConfig
from lightning_automodel.loading.initialize import broadcast_weights, materialize
from lightning_automodel.mesh import Axes
from lightning_automodel.modules.structure import class_names
from lightning_automodel.parallel.guards.replica_check import check_replicas_every
from lightning_automodel.parallel.megatron_fsdp.building import Dtypes, finish_split, is_split, split_over_tp
from lightning_automodel.parallel.megatron_fsdp.passes import Passes
from lightning_automodel.parallel.megatron_fsdp.sharded import ShardedModules

_PASSES = "_passes_of_megatron_fsdp"


def parallelize(
    model: nn.Module,
    dp_mesh: DeviceMesh,
    tp_mesh: DeviceMesh,
    config: MegatronFSDPConfig,
    optimizer: Optimizer | None,
) -> tuple[nn.Module, Optimizer | None]:
    """Does the work of :func:`~lightning_automodel.megatron.megatron_fsdp_strategy_parallelize`.

    Raises:
        ValueError: if ``model`` was made parallel already, or what it holds cannot be.
    """
    if is_split(model) or any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        name = class_names(model)[0]
        raise ValueError(f"{name} was made parallel already; make a model parallel once, or build it again")
    where = torch.device("cuda", torch.cuda.current_device()) if dp_mesh.device_type == "cuda" else torch.device("cpu")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    dtypes = Dtypes(
        main=torch.float32 if config.preserve_fp32_weights else None,
        reduction=torch.float32 if config.grad_reduce_in_fp32 else None,
    )
    split_over_tp(model, Axes(tp=tp_mesh, data=dp_mesh), config)
    if any(parameter.is_meta for parameter in model.parameters()):
        materialize(model, where)
        broadcast_weights(model, dp_mesh)
    finish_split(model, tp_mesh, dtypes)
    sharded = ShardedModules([model], dp_mesh, tp_mesh, config, dtypes, where)
    vars(model)[_PASSES] = Passes(sharded, [model])
    if config.check_replicas_every_n_steps is not None:
        check_replicas_every(model, config.check_replicas_every_n_steps, sharded.replicas)
    if optimizer is not None:
        _exchange(optimizer, names, dict(model.named_parameters()))
    return model, optimizer


def sharded_of(model: nn.Module) -> ShardedModules:
    """Finds what shards ``model``.

    Raises:
        ValueError: if nothing does.
    """
    return _passes_of(model).sharded


@contextmanager
def accumulating(model: nn.Module) -> Generator[None, None, None]:
    """Does the work of :func:`~lightning_automodel.megatron.accumulating`."""
    passes = _passes_of(model)
    passes.is_accumulating = True
    try:
        yield
    finally:
        passes.is_accumulating = False


def _passes_of(model: nn.Module) -> Passes:
    if _PASSES not in vars(model):
        raise ValueError(f"{type(model).__name__} did not go through megatron_fsdp_strategy_parallelize")
    return vars(model)[_PASSES]


def _exchange(optimizer: Optimizer, names: dict[int, str], sharded: dict[str, nn.Parameter]) -> None:
    """Gives the groups of ``optimizer`` the sharded parameters. Its state begins anew."""
    optimizer.state.clear()
    for group in optimizer.param_groups:
        if unknown := [p for p in group["params"] if id(p) not in names]:
            raise ValueError(
                f"the optimizer has a parameter of shape {tuple(unknown[0].shape)} that is not the model's"
            )
        group["params"] = [sharded[names[id(p)]] for p in group["params"]]
