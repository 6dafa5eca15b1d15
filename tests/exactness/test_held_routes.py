"""Gradients of routers and experts in bfloat16 under tensor parallelism, with the routes of one process in float32."""

import pytest
import torch

from lightning_automodel.config import FSDP2Config
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.testing.pool import Pool
from tests.support.families import tiny_model
from tests.support.routes import farthest, hold_routes, note_routes

SEEDS = 5


def distances(sequence_parallel: bool) -> tuple[float, float]:
    """Run on each of two ranks: how far gradients in bfloat16 are, of one process and of both; means of batches."""
    exact, alone, apart = (tiny_model("qwen3_moe", num_experts=8, norm_topk_prob=True) for _ in range(3))
    alone.bfloat16()
    config = FSDP2Config(sequence_parallel=sequence_parallel)
    parallelize(apart, build_mesh(resolve_sizes(2, tp=2), "cpu"), config, param_dtype=torch.bfloat16)
    models, found = (exact, alone, apart), []
    routes = note_routes(exact)
    for seed in range(SEEDS):
        ids = torch.randint(128, (2, 32), generator=torch.Generator().manual_seed(seed))
        routes.clear()
        for model in models:
            model.zero_grad()
            holds = [] if model is exact else hold_routes(model, routes)
            model(input_ids=ids, labels=ids).loss.backward()
            for hold in holds:
                hold.remove()
        found.append([farthest(model, exact) for model in models[1:]])
    return tuple(torch.tensor(found).mean(0).tolist())  # type: ignore[return-value]


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "in-sequence"])
def test_bfloat16_is_as_near_as_that_of_one_process(sequence_parallel: bool, pool2: Pool) -> None:
    for alone, apart in pool2.run(distances, sequence_parallel):
        assert apart < 1.2 * alone
