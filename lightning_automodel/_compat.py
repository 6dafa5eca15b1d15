"""Every use of a private name of torch, lightning or transformers, each with its reason.

What stands here may break with a new release of these libraries; what stands elsewhere should not.
"""

import inspect
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial

from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout as default_timeout
from lightning.fabric.utilities.optimizer import _optimizers_to_device as optimizers_to_device
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from transformers import PreTrainedModel
from transformers.distributed.sharding_utils import DtensorShardOperation
from transformers.utils.output_capturing import maybe_install_capturing_hooks

# Lightning's own timeout and move of optimizer states: a strategy is expected to use them, but they are not exported.
__all__ = ["default_timeout", "local_slice", "optimizers_to_device", "patched_pretrained_loading", "root_mesh"]


@contextmanager
def patched_pretrained_loading(
    *, load: Callable, initialize: Callable, finalize: Callable
) -> Generator[None, None, None]:
    """Wraps three steps of ``PreTrainedModel.from_pretrained`` for the duration of the context.

    transformers has no public hook between building on the meta device and reading weights, which is where a model must
    be sharded so that each rank reads its own slices only. Each argument takes the original function first.
    """
    names = {
        "_load_pretrained_model": load,
        "_initialize_missing_keys": initialize,
        "_finalize_model_loading": finalize,
    }
    originals = {name: PreTrainedModel.__dict__[name] for name in names}
    try:
        for name, function in names.items():
            original = originals[name]
            if isinstance(original, staticmethod):
                setattr(PreTrainedModel, name, staticmethod(partial(function, original.__func__)))
            else:
                setattr(PreTrainedModel, name, _method(function, original))
        yield
    finally:
        for name, original in originals.items():
            setattr(PreTrainedModel, name, original)


def _method(function: Callable, original: Callable) -> Callable:
    def method(self: PreTrainedModel, *args: object) -> object:
        return function(original, self, *args)

    return method


def local_slice(value: Tensor, like: DTensor) -> DTensor:
    """The whole ``value`` (equal on all ranks) as a DTensor that lies as ``like`` does.

    ``distribute_tensor`` refuses the strided shards that FSDP2 makes of a tensor-parallel parameter, so the local slice
    is cut by transformers' own reader, which knows them.
    """
    local = DtensorShardOperation(like).shard_tensor(value, device=value.device, dtype=value.dtype)
    assert local is not None
    return DTensor.from_local(
        local.clone(),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that ``mesh`` is a slice of. torch offers no public way to ask."""
    return mesh._get_root_mesh()


def strided_shard(dim: int, groups: int) -> Placement:
    """Dimension ``dim`` holds ``groups`` matrices one after the other; each rank has a slice of every one.

    torch has this placement under a private name: FSDP2 makes it, and transformers' plans need it for fused weights.
    """
    return _StridedShard(dim, split_factor=groups)


def recorded_outputs(model: nn.Module, key: str) -> Iterator[tuple[str, nn.Module, int]]:
    """The modules whose output transformers records under ``key`` (such as ``router_logits``), and its index there.

    transformers keeps the rule in private registries and installs its hooks with the first forward pass. They are
    installed now, so that hooks of ours can stand before and after them.
    """
    if isinstance(model, PreTrainedModel):
        maybe_install_capturing_hooks(model)
    for name, module in model.named_modules():
        for hook in module._forward_hooks.values():
            if getattr(hook, "__name__", "") == "output_capturing_hook":
                variables = inspect.getclosurevars(hook).nonlocals
                if variables["key"] == key:
                    yield name, module, variables["index"]
