"""A Llama split as torch's tutorials do: a style per projection, FSDP2 around blocks. Imports nothing of ours."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

PLAN: dict[str, Any] = {
    **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
    "self_attn.o_proj": RowwiseParallel(),
    **{f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
    "mlp.down_proj": RowwiseParallel(),
}
ENDS: dict[str, Any] = {
    "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
    "lm_head": ColwiseParallel(output_layouts=Replicate()),
}


def split_by_torch(model: Any, tp: DeviceMesh, dp: DeviceMesh, compiled: bool) -> nn.Module:
    """Split ``model`` over ``tp``, and shard it over ``dp``."""
    parallelize_module(model, tp, ENDS)
    for layer in model.model.layers:
        parallelize_module(layer, tp, PLAN)
        if compiled:
            layer.compile()
        fully_shard(layer, mesh=dp)
    return fully_shard(model, mesh=dp)


def shard_by_hand(model: Any, tp: DeviceMesh, dp: DeviceMesh) -> Any:
    """Split ``model`` over the axis that has more than one rank: layers over ``tp``, or blocks by FSDP2 over ``dp``."""
    if tp.size() > 1:
        parallelize_module(model, tp, ENDS)
        for layer in model.model.layers:
            parallelize_module(layer, tp, PLAN)
        return model
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    for layer in base.model.layers:
        fully_shard(layer, mesh=dp)
    return fully_shard(model, mesh=dp)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW on what trains, fused, as transformers' Trainer has it; one kernel takes tensors of one mesh only."""
    groups = [{"params": group} for group in _by_mesh(p for p in model.parameters() if p.requires_grad)]
    return torch.optim.AdamW(groups, lr=1e-5, fused=True)


def clip(parameters: list[nn.Parameter], limit: float) -> None:
    """Clip the norm of gradients as ``clip_grad_norm_`` does, which takes tensors of one mesh only."""
    groups = _by_mesh(p for p in parameters if p.grad is not None)
    if len(groups) < 2:
        torch.nn.utils.clip_grad_norm_(parameters, limit)
        return
    norms = [torch.nn.utils.get_total_norm([p.grad for p in group if p.grad is not None]) for group in groups]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = torch.linalg.vector_norm(torch.stack(whole))
    for group in groups:
        torch.nn.utils.clip_grads_with_norm_(group, limit, total)


def _by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return list(groups.values())
