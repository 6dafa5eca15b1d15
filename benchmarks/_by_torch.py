"""A Llama split as torch's tutorials do: a style per projection, FSDP2 around blocks. Imports nothing of ours."""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

PLAN: dict[str, Any] = {
    **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
    "self_attn.o_proj": RowwiseParallel(),
    **{f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
    "mlp.down_proj": RowwiseParallel(),
}


def split_by_torch(model: Any, tp: DeviceMesh, dp: DeviceMesh, compiled: bool) -> nn.Module:
    """Split ``model`` over ``tp``, and shard it over ``dp``."""
    ends = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, tp, ends)
    for layer in model.model.layers:
        parallelize_module(layer, tp, PLAN)
        if compiled:
            layer.compile()
        fully_shard(layer, mesh=dp)
    return fully_shard(model, mesh=dp)
