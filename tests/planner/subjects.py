"""One step of a small Llama in a layout: on real ranks, where the same watch counts, and as the planner plays it."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, PreTrainedConfig, Qwen3MoeConfig

from lightning_automodel import FSDP2Config, parallelize
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallel.fsdp2 import sharding
from lightning_automodel.planner.experts import dispatch_evenly
from lightning_automodel.planner.plan import build
from lightning_automodel.planner.play import Run, batch_of, play, stage
from lightning_automodel.planner.step import prepare, watched_step
from lightning_automodel.planner.watch import Watched
from lightning_automodel.strategies.precision import FSDP2Precision


@dataclass(frozen=True)
class Layout:
    """Ranks, sizes of the mesh, switches, the rest of a run, whether the model has experts, and what trains of it."""

    ranks: int
    sizes: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    experts: bool = False
    peft: dict[str, Any] | None = None
    freeze: tuple[str, ...] = ()


LORA = {"r": 4, "target_modules": "all-linear"}
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
    "dp2-lora": Layout(2, {}, {"activation_checkpointing": True}, peft=LORA),
    "tp2-lora": Layout(2, {"tp": 2}, {"sequence_parallel": True, "chunked_loss": 16}, peft=LORA),
    "dp2-lora-bf16": Layout(2, {}, run={"precision": "bf16-true"}, peft={"target_modules": ["q_proj", "down_proj"]}),
    "dp2-frozen": Layout(2, {}, freeze=("model.embed_tokens", "model.layers.[01].*")),
}


def llama(layers: int) -> PreTrainedConfig:
    """A Llama with fewer heads of keys than of queries."""
    return LlamaConfig(
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=8,
        vocab_size=254,
    )


def mixture() -> PreTrainedConfig:
    """A mixture of eight experts."""
    return Qwen3MoeConfig(
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=8,
        vocab_size=254,
        num_experts=8,
        num_experts_per_tok=2,
    )


def model_on_meta(layout: Layout = LAYOUTS["dp2"], layers: int = 3) -> nn.Module:
    """The model of a layout, on the meta device."""
    return build(mixture() if layout.experts else llama(layers), layout.peft, layout.freeze)


def run_of(layout: Layout) -> Run:
    sizes = resolve_sizes(layout.ranks, **layout.sizes)
    rest = {"sequence_length": 32, "micro_batch": 2, **layout.run}
    return Run(sizes=sizes, config=FSDP2Config(**layout.config), device_type="cpu", **rest)


def play_layout(layout: Layout, rank: int = 0) -> Watched:
    run = run_of(layout)
    with stage(run, rank) as mesh:
        return play(model_on_meta(layout), run, mesh)


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
    mesh, model = build_mesh(run.sizes, "cpu"), model_on_meta(layout)
    # As on a GPU: torch's own collectives, from no kept memory.
    with mock.patch.object(sharding, "communicate_over_gloo"):
        parallelize(model, mesh, run.config, mp_policy=precision.mp_policy, param_dtype=precision.param_dtype)
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        nn.init.constant_(tensor.to_local() if isinstance(tensor, DTensor) else tensor, 0.01)
    model.train()
    optimizer = run.optimizer(p for p in model.parameters() if p.requires_grad)
    prepare(model, optimizer)
    step = {"accumulation": run.accumulation, "clips": run.clips, "defers": run.config.defer_fsdp_grad_sync}
    watched_step(model, optimizer, batch_of(run), mesh, **step)
    watched = watched_step(model, optimizer, batch_of(run), mesh, **step)
    own = {
        "parameters": bytes_of([*model.parameters(), *model.buffers()]),
        "gradients": bytes_of([p.grad for p in model.parameters()]),
        "optimizer": bytes_of([x for state in optimizer.state.values() for x in state.values()]),
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


def bytes_of(tensors: list[Any]) -> int:
    """Bytes of what a rank holds of tensors; shared memory once."""
    locals_ = [t.to_local() if isinstance(t, DTensor) else t for t in tensors if isinstance(t, Tensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in locals_}.values())
