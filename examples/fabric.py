"""A training loop with Lightning's Fabric: python -m examples.fabric, after python -m examples.quickstart.

Fabric starts the processes, moves batches and prints; its own strategies stay out of it. The model is made parallel by
the functions that the strategies of this package call, too.
"""

from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM

from lightning_automodel.finetuning import TextDataModule
from lightning_automodel.gradients import clip_grad_norm_
from lightning_automodel.loading import sharded_loading
from lightning_automodel.mesh import DP, axis, build_mesh, resolve_sizes
from lightning_automodel.parallelizer import parallelize

ACCELERATOR, DEVICES = "cpu", 2  # cluster: "gpu", 8
MODEL, FILES = "build/quickstart/export", "build/quickstart/text/*.py"  # yours
OUTPUT = "build/fabric"
MICRO_BATCHES = 2


def main(model: str = MODEL, files: str = FILES, output: str = OUTPUT, steps: int = 20) -> list[float]:
    """Trains, and writes what ``from_pretrained`` reads; returns the losses."""
    fabric = L.Fabric(accelerator=ACCELERATOR, devices=DEVICES, strategy="ddp")  # its processes, no wrapper
    fabric.launch()
    mesh = build_mesh(resolve_sizes(fabric.world_size, tp=2), fabric.device.type)
    with sharded_loading(lambda module: parallelize(module, mesh), fabric.device):
        module = AutoModelForCausalLM.from_pretrained(model).train()
    data = axis(mesh, DP)  # ranks of one tp group see the same rows
    batches = fabric.setup_dataloaders(
        rows(model, files, output, data.size(), data.get_local_rank()), use_distributed_sampler=False
    )
    losses = train(fabric, module, batches, data.get_group(), steps)
    module.save_pretrained(f"{output}/export")  # on every rank; rank 0 writes
    return losses


def rows(model: str, files: str, output: str, replicas: int, rank: int) -> DataLoader:
    """Loads the rows of one data rank."""
    data = TextDataModule(model, files, sequence_length=128, batch_size=4, packing=True, cache_dir=f"{output}/{rank}")
    data.setup("fit")
    found = data.train_dataloader()
    sampler: Any = DistributedSampler(found.dataset, replicas, rank, seed=1)
    return DataLoader(found.dataset, found.batch_size, sampler=sampler, collate_fn=found.collate_fn, drop_last=True)


def train(fabric: L.Fabric, module: Any, batches: Any, group: Any, steps: int) -> list[float]:
    """Each step adds up the gradients of several micro-batches and reduces them with the last."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=2e-4)
    losses: list[float] = []
    total = torch.zeros((), device=fabric.device)
    for index, batch in enumerate(batches, start=1):
        is_last = index % MICRO_BATCHES == 0
        module.set_requires_gradient_sync(is_last)
        loss: Tensor = module(**batch, use_cache=False).loss / MICRO_BATCHES
        loss.backward()
        total += loss.detach()
        if not is_last:
            continue
        norm = clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch.distributed.all_reduce(total, group=group)
        losses.append(total.item() / torch.distributed.get_world_size(group))
        fabric.print(f"step {len(losses)}: loss {losses[-1]:.4f}, gradient norm {norm.item():.4f}")
        total.zero_()
        if len(losses) == steps:
            break
    return losses


if __name__ == "__main__":
    main()
