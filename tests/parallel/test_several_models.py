"""A loop of one's own with several models, some of which the last micro-batch of a step does not use."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModel

from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.testing.pool import Pool
from tests.support.training import HIDDEN, LENGTH, VOCABULARY, tiny_llama, whole

RANKS, STEPS, MICRO_BATCHES, KINDS = 2, 3, 2, 3


def train(data_ranks: list[int], is_parallel: bool) -> list[list[Tensor | None]]:
    """Gradients of each step: of a backbone, and of two heads that micro-batches use in turn."""
    torch.manual_seed(0)
    models: list[Any] = [AutoModel.from_config(tiny_llama().config), *(nn.Linear(HIDDEN, KINDS) for _ in range(2))]
    if is_parallel:
        mesh = build_mesh(resolve_sizes(RANKS, dp_shard=RANKS), "cpu")
        models = [parallelize(model, mesh) for model in models]
    backbone, *heads = models
    parameters = [p for model in models for p in model.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    found = []
    for step in range(STEPS):
        for rank, i in [(rank, i) for i in range(MICRO_BATCHES) for rank in data_ranks]:
            for model in models if is_parallel else ():
                model.set_requires_gradient_sync(i == MICRO_BATCHES - 1)
            numbers = torch.Generator().manual_seed(100 * step + 10 * i + rank)
            ids = torch.randint(VOCABULARY, (2, LENGTH), generator=numbers)
            kinds = torch.randint(KINDS, (2,), generator=numbers)
            features = backbone(input_ids=ids).last_hidden_state.mean(1)
            loss = cross_entropy(heads[(i + step) % 2](features), kinds)
            (loss / (MICRO_BATCHES * len(data_ranks))).backward()
        found.append([None if p.grad is None else whole(p.grad) for p in parameters])
        optimizer.step()
        optimizer.zero_grad()
    return found


def train_on_rank() -> list[list[Tensor | None]]:
    """Runs on each rank."""
    return train([torch.distributed.get_rank()], is_parallel=True)


def test_what_waits_is_reduced_with_the_step(pool2: Pool) -> None:
    expected = train([0, 1], is_parallel=False)
    for found in pool2.run(train_on_rank):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
