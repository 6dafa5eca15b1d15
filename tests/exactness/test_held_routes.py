"""Gradients of routers and experts in bfloat16 under tensor parallelism, with the routes of one process in float32."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from lightning_automodel.config import FSDP2Config
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.testing.pool import Pool
from tests.support.routes import hold_routes, note_routes

SEEDS = 5


def tiny() -> Qwen3MoeForCausalLM:
    """Eight experts, two for each token."""
    config = Qwen3MoeConfig(
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=128,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        use_cache=False,
    )
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(config)


def farthest(model: nn.Module, exact: nn.Module) -> float:
    """Find the largest distance of a gradient from the exact one, as a part of that one's norm."""
    found = []
    for name, parameter in exact.named_parameters():
        gradient: Any = model.get_parameter(name).grad
        whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        found.append(float((whole.float() - parameter.grad).norm() / parameter.grad.norm()))  # type: ignore[union-attr]
    return max(found)


def distances(sequence_parallel: bool, held: bool) -> tuple[float, float]:
    """Run on each of two ranks: how far gradients in bfloat16 are, of one process and of both; means of batches."""
    exact, alone, apart = tiny(), tiny().bfloat16(), tiny()
    config = FSDP2Config(sequence_parallel=sequence_parallel)
    parallelize(apart, build_mesh(resolve_sizes(2, tp=2), "cpu"), config, param_dtype=torch.bfloat16)
    models, found = (exact, alone, apart), []
    routes = note_routes(exact)
    for seed in range(SEEDS):
        ids = torch.randint(128, (2, 32), generator=torch.Generator().manual_seed(seed))
        routes.clear()
        for model in models:
            model.zero_grad()
            holds = hold_routes(model, routes) if held and model is not exact else []
            model(input_ids=ids, labels=ids).loss.backward()
            for hold in holds:
                hold.remove()
        found.append([farthest(model, exact) for model in models[1:]])
    return tuple(torch.tensor(found).mean(0).tolist())  # type: ignore[return-value]


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "in-sequence"])
def test_bfloat16_is_as_near_as_that_of_one_process(sequence_parallel: bool, pool2: Pool) -> None:
    for alone, apart in pool2.run(distances, sequence_parallel, True):
        assert apart < 1.2 * alone
