"""What a loop of one's own needs of Megatron-FSDP: the beginning and end of backward passes, found by autograd."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_automodel._compat.pytree import tree_leaves
from lightning_automodel._compat.tensors import after_backward
from lightning_automodel.config import MegatronFSDPConfig
from lightning_automodel.loading.initialize import broadcast_weights, materialize
from lightning_automodel.mesh import Axes
from lightning_automodel.modules.structure import class_names
from lightning_automodel.parallel.megatron_fsdp.building import Dtypes, finish_split, is_split, split_over_tp
from lightning_automodel.parallel.megatron_fsdp.sharded import ShardedModules
from lightning_automodel.parallel.replica_check import check_replicas_every

_SHARDED = "_sharded_by_megatron_fsdp"


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
    vars(model)[_SHARDED] = _Loop(sharded)
    if config.check_replicas_every_n_steps is not None:
        check_replicas_every(model, config.check_replicas_every_n_steps, sharded.replicas)
    model.register_forward_hook(_watch_outputs)
    if optimizer is not None:
        _exchange(optimizer, names, dict(model.named_parameters()))
    return model, optimizer


class _Loop:
    """The state of one model in a loop: whether a backward pass runs, and whether more micro-batches follow."""

    def __init__(self, sharded: ShardedModules) -> None:
        self.sharded = sharded
        self.is_accumulating = False
        self._runs = False

    def begin(self) -> None:
        if not self._runs:
            self._runs = True
            self.sharded.begin_backward(is_last=not self.is_accumulating)
            after_backward(self.end)

    def end(self) -> None:
        self._runs = False
        self.sharded.end_backward()


def sharded_of(model: nn.Module) -> ShardedModules:
    """Finds what shards ``model``.

    Raises:
        ValueError: if nothing does.
    """
    return _loop_of(model).sharded


@contextmanager
def accumulating(model: nn.Module) -> Generator[None, None, None]:
    """Does the work of :func:`~lightning_automodel.megatron.accumulating`."""
    loop = _loop_of(model)
    loop.is_accumulating = True
    try:
        yield
    finally:
        loop.is_accumulating = False


def _loop_of(model: nn.Module) -> _Loop:
    if _SHARDED not in vars(model):
        raise ValueError(f"{type(model).__name__} did not go through megatron_fsdp_strategy_parallelize")
    return vars(model)[_SHARDED]


def _watch_outputs(model: nn.Module, args: tuple, output: Any) -> None:
    loop = _loop_of(model)
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if tensors:
        register_multi_grad_hook(tensors, lambda _: loop.begin(), mode="any")


def _exchange(optimizer: Optimizer, names: dict[int, str], sharded: dict[str, nn.Parameter]) -> None:
    """Gives the groups of ``optimizer`` the sharded parameters. Its state begins anew."""
    optimizer.state.clear()
    for group in optimizer.param_groups:
        if unknown := [p for p in group["params"] if id(p) not in names]:
            raise ValueError(
                f"the optimizer has a parameter of shape {tuple(unknown[0].shape)} that is not the model's"
            )
        group["params"] = [sharded[names[id(p)]] for p in group["params"]]
