"""A training loop of one's own, without Lightning: torchrun --nproc-per-node=2 examples/torchrun.py [MODEL] [--tp=2].

Without a MODEL directory it builds a tiny Llama, and trains on random tokens: put your data in ``micro_batches``.
"""

import argparse
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import AutoModelForCausalLM, LlamaConfig

from lightning_automodel.gradients import clip_grad_norm_
from lightning_automodel.loading import materialize, sharded_loading
from lightning_automodel.mesh import gloo_in_order
from lightning_automodel.parallelizer import fsdp2_strategy_parallelize

MICRO_BATCHES, ROWS, LENGTH = 2, 2, 32


def main() -> None:
    """Trains some steps, and prints the loss and the gradient norm of each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", help="directory or name of a checkpoint; none: a tiny Llama")
    parser.add_argument("--tp", type=int, help="processes that split each layer; none: all")
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()

    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    with gloo_in_order():  # on CPUs: two threads of a group may free the same memory
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        tp = arguments.tp or dist.get_world_size()
        mesh = init_device_mesh(device.type, (dist.get_world_size() // tp, tp), mesh_dim_names=("dp_shard_cp", "tp"))
    try:
        train(build(arguments.model, mesh, device), mesh, device, arguments.steps)
    finally:
        dist.destroy_process_group()


def build(path: str | None, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    """A parallel model: each process reads, or draws, the slices of the weights that it keeps."""
    policy = None if device.type == "cuda" else MixedPrecisionPolicy()  # None: bfloat16, reduced in float32

    def parallelize(model: nn.Module) -> None:
        fsdp2_strategy_parallelize(model, mesh, policy)

    if path is not None:
        with sharded_loading(parallelize, device):
            return AutoModelForCausalLM.from_pretrained(path).train()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    parallelize(model)
    materialize(model, device)
    return model.train()


def train(model: Any, mesh: DeviceMesh, device: torch.device, steps: int) -> None:
    """Each step adds up the gradients of several micro-batches and reduces them with the last."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    data = mesh["dp_shard_cp"]
    for step in range(steps):
        total = torch.zeros((), device=device)
        for i, ids in enumerate(micro_batches(step, data.get_local_rank(), model.config.vocab_size)):
            model.set_requires_gradient_sync(i == MICRO_BATCHES - 1)
            ids = ids.to(device)
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss / MICRO_BATCHES
            loss.backward()
            total += loss.detach()
        norm = clip_grad_norm_(model.parameters(), 1.0)  # torch's gives the same numbers, with a warning
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total, group=data.get_group())
        if dist.get_rank() == 0:
            print(f"step {step}: loss {total.item() / data.size():.4f}, gradient norm {norm.item():.4f}", flush=True)


def micro_batches(step: int, data_rank: int, vocabulary: int) -> Iterator[Tensor]:
    """Token ids [rows, length]: the same on all processes of a ``tp`` group, others on other data ranks."""
    generator = torch.Generator().manual_seed(1000 * step + data_rank)
    for _ in range(MICRO_BATCHES):
        yield torch.randint(vocabulary // 8, (ROWS, LENGTH), generator=generator)


if __name__ == "__main__":
    main()
