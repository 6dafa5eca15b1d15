"""Private names of Lightning, each with its reason; those of its trainer are in trainer.py and evaluation_loops.py."""

import atexit
import warnings

import torch
import torch.distributed as dist
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout as default_timeout
from lightning.fabric.utilities.data import _auto_add_worker_init_fn as add_worker_init_fn
from lightning.fabric.utilities.distributed import _destroy_dist_connection as destroy_groups
from lightning.fabric.utilities.optimizer import _optimizers_to_device as optimizers_to_device
from lightning.fabric.utilities.throughput import Throughput
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.overrides.distributed import _register_ddp_comm_hook as register_comm_hook
from lightning.pytorch.trainer.call import _call_strategy_hook as call_strategy_hook
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

# Lightning's own timeout and move of optimizer states: a strategy is expected to use them, but they are not exported.
__all__ = [
    "add_worker_init_fn",
    "call_strategy_hook",
    "check_all_reduced",
    "default_timeout",
    "optimizers_to_device",
    "register_comm_hook",
]

# Lightning 2.6 asks torch 2.13 in a deprecated way, and every run would say so once per process and loop.
warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")


def check_all_reduced(wrapper: nn.Module | None) -> None:
    """Check, behind a backward pass, that torch's wrapper for replicas has reduced all that it was made for.

    By itself it says so before the next one only, when an optimizer has taken a step with what a rank has.

    Raises:
        RuntimeError: of torch.
    """
    if isinstance(wrapper, DistributedDataParallel):
        wrapper._check_reducer_finalized()


def destroy_groups_at_exit() -> None:
    """Ends the process groups when this process ends. Lightning does so for a backend of the name "nccl" alone, and not
    for "cuda:nccl,cpu:gloo", of whose groups torch then warns; others may still wait for what this one has begun.
    """
    if "nccl" in dist.get_backend_config() and dist.get_backend() != "nccl":
        atexit.unregister(destroy_groups)
        atexit.register(destroy_groups)


def set_device(module: nn.Module, device: torch.device) -> None:
    """Tells a LightningModule, and those inside of it, where they compute; Lightning learns it from ``to`` alone."""
    for part in module.modules():
        if isinstance(part, LightningModule):
            part._device = device


def set_device_mesh(module: LightningModule, mesh: DeviceMesh) -> None:
    """Sets what ``module.device_mesh`` returns; Lightning's own strategies set it so."""
    module._device_mesh = mesh


def throughputs_of(monitor: ThroughputMonitor) -> list[Throughput]:
    """Returns the ``Throughput`` objects of ``monitor``, one per stage: their world size has no public setter."""
    return list(monitor._throughputs.values())


def is_compiled(module: LightningModule) -> bool:
    """Tells whether Lightning has put ``torch.compile`` around the steps of ``module``; only a private attribute says
    so.
    """
    return module._compiler_ctx is not None


def optimizers_of(module: LightningModule) -> list[Optimizer]:
    """Lists the optimizers of the trainer of a LightningModule; its public attribute raises where there is none."""
    trainer = module._trainer
    return [] if trainer is None else trainer.optimizers
