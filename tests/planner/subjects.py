"""One step of a small Llama in a layout: on real ranks, where the same watch counts, and as the planner plays it."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from lightning_automodel import FSDP2Config, parallelize
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallel.fsdp2 import sharding
from lightning_automodel.planner.experts import dispatch_evenly
from lightning_automodel.planner.play import Run, batch_of, play, stage
from lightning_automodel.planner.step import prepare, watched_step
from lightning_automodel.planner.watch import Watched
from lightning_automodel.strategies.precision import FSDP2Precision


@dataclass(frozen=True)
class Layout:
    """Ranks, sizes of the mesh, switches, the rest of a run, and whether the model is a mixture of experts."""

    ranks: int
    sizes: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    experts: bool = False


LAYOUTS = {
    "dp2": Layout(2, {}),
    "dp2-accumulated": Layout(2, {}, run={"accumulation": 3, "precision": "32-true"}),
    "tp2": Layout(2, {"tp": 2}),
    "tp2-sequence": Layout(2, {"tp": 2}, {"sequence_parallel": True}, {"precision": "32-true"}),
    "cp2": Layout(2, {"cp": 2}, {"chunked_loss": 16}),
    "replicas2-shards2": Layout(4, {"dp_replicate": 2}, {"activation_checkpointing": True}),
    "dp2-tp2-sequence": Layout(4, {"tp": 2}, {"sequence_parallel": True, "activation_checkpointing": "selective"}),
    "dp2-cp2-gathered": Layout(4, {"cp": 2}, {"cp_exchange": "gather"}, {"micro_batch": 1}),
    "dp4-ep2": Layout(4, {"ep": 2}, {"expert_dispatcher": dispatch_evenly}, experts=True),
    "dp2-tp2-ep2": Layout(4, {"tp": 2, "ep": 2}, {"expert_dispatcher": dispatch_evenly}, experts=True),
    "cp2-tp2-sequence": Layout(4, {"cp": 2, "tp": 2}, {"sequence_parallel": True}),
}


def model_on_meta(layers: int = 3) -> nn.Module:
    """A Llama with fewer heads of keys than of queries, on the meta device."""
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=8,
        vocab_size=254,
        use_cache=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def experts_on_meta() -> nn.Module:
    """A mixture of eight experts, on the meta device."""
    config = Qwen3MoeConfig(
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=8,
        vocab_size=254,
        num_experts=8,
        num_experts_per_tok=2,
        use_cache=False,
    )
    with torch.device("meta"):
        return Qwen3MoeForCausalLM(config)


def run_of(layout: Layout) -> Run:
    sizes = resolve_sizes(layout.ranks, **layout.sizes)
    rest = {"sequence_length": 32, "micro_batch": 2, **layout.run}
    return Run(sizes=sizes, config=FSDP2Config(**layout.config), device_type="cpu", **rest)


def play_layout(layout: Layout, rank: int = 0) -> Watched:
    run = run_of(layout)
    with stage(run, rank) as mesh:
        return play(experts_on_meta() if layout.experts else model_on_meta(), run, mesh)


@dataclass
class Real:
    """What a real rank counted: by the watch, and by others."""

    watched: Watched
    saved: int
    calls: int
    bytes: Counter[str]


def run_really(name: str) -> Real:
    """Take three steps on this rank: the second is watched; in the third, torch's own hooks and debugger count."""
    layout = LAYOUTS[name]
    run, precision = run_of(layout), FSDP2Precision(layout.run.get("precision", "bf16-mixed"))
    mesh, model = build_mesh(run.sizes, "cpu"), experts_on_meta() if layout.experts else model_on_meta()
    # As on a GPU: torch's own collectives, from no kept memory.
    with mock.patch.object(sharding, "communicate_over_gloo"):
        parallelize(model, mesh, run.config, mp_policy=precision.mp_policy, param_dtype=precision.param_dtype)
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        nn.init.constant_(tensor.to_local() if isinstance(tensor, DTensor) else tensor, 0.01)
    model.train()
    optimizer = run.optimizer(model.parameters())
    prepare(model, optimizer)
    step = {"accumulation": run.accumulation, "clips": run.clips, "defers": run.config.defer_fsdp_grad_sync}
    watched_step(model, optimizer, batch_of(run), mesh, **step)
    watched = watched_step(model, optimizer, batch_of(run), mesh, **step)
    own = {
        "parameters": _bytes([*model.parameters(), *model.buffers()]),
        "gradients": _bytes([p.grad for p in model.parameters()]),
        "optimizer": _bytes([x for state in optimizer.state.values() for x in state.values()]),
    }
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        watched_step(model, optimizer, batch_of(run), mesh, **step)
    calls = sum(event.count for event in profiler.key_averages() if event.key.startswith("gloo:"))
    return Real(watched, _saved(model, batch_of(run)), calls, Counter(own))


def _saved(model: nn.Module, batch: dict[str, Tensor]) -> int:
    """Bytes of what autograd keeps for the backward pass, without parameters, gathered ones included."""
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
        kept[id(storage)] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(**batch).loss
    held = {p.to_local() if isinstance(p, DTensor) else p for p in (*model.parameters(), *model.buffers())}
    of_model = {id(tensor.untyped_storage()) for tensor in (*held, *batch.values())}
    total = sum(storage.nbytes() for key, storage in kept.items() if key not in of_model)
    loss.backward()
    return total


def _bytes(tensors: list[Any]) -> int:
    locals_ = [t.to_local() if isinstance(t, DTensor) else t for t in tensors if isinstance(t, Tensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in locals_}.values())
