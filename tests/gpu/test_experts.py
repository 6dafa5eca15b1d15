"""Experts on CUDA: tokens travel under nccl, and one GPU's run is that of plain PyTorch."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from lightning_automodel import FSDP2Config
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.testing.pool import Nursery, Pool
from tests.support.routes import farthest, hold_routes, note_routes


def tiny() -> Qwen3MoeForCausalLM:
    """Eight experts, two for each token."""
    config = Qwen3MoeConfig(
        hidden_size=256,
        moe_intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=512,
        num_experts=8,
        num_experts_per_tok=2,
        use_cache=False,
    )
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(config).cuda()


def worst(ep: int) -> float:
    """Runs on each rank, which has a GPU: the largest relative error of a gradient."""
    torch.distributed.init_process_group("nccl")
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    torch.cuda.set_device(rank)
    alone, spread = tiny(), tiny()
    parallelize(spread, build_mesh(resolve_sizes(ranks, ep=ep), "cuda"))
    ids = [torch.randint(512, (2, 32), generator=torch.Generator().manual_seed(i)).cuda() for i in range(ranks)]
    spread(input_ids=ids[rank], labels=ids[rank]).loss.backward()
    for x in ids:
        (alone(input_ids=x, labels=x).loss / ranks).backward()
    return farthest(spread, alone)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="tokens travel between two GPUs")
def test_tokens_travel_between_gpus(nursery: Nursery) -> None:
    ranks = 4 if torch.cuda.device_count() >= 4 else 2
    assert max(Pool(nursery, ranks).run(worst, 2, trainer=True, timeout=300)) < 0.05  # computed in bfloat16


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_kernels_agree(implementation: str) -> None:
    model = tiny().bfloat16()
    ids = torch.randint(512, (2, 64), generator=torch.Generator().manual_seed(0)).cuda()
    losses = []
    for name in ("eager", implementation):
        model.set_experts_implementation(name)
        losses.append(float(model(input_ids=ids, labels=ids).loss))
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


def adapted(rank: int, parallel: bool, compiled: bool) -> nn.Module:
    """The same with LoRA on its experts, in bfloat16."""
    base = tiny()
    parameters = [f"experts.{name}" for name in ("gate_up_proj", "down_proj")]
    model: Any = get_peft_model(base, LoraConfig(r=rank, target_modules=["q_proj"], target_parameters=parameters))
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0, 0.1)
    if parallel:
        config = FSDP2Config(enable_compile=compiled, activation_checkpointing="full" if compiled else False)
        parallelize(base, build_mesh(resolve_sizes(1), "cuda"), config, param_dtype=torch.bfloat16)
    return model


def lora_errors(rank: int, compiled: bool) -> tuple[float, float]:
    """Runs on a rank: errors of factors' gradients in bfloat16, ours and peft's, against float32 on the same routes."""
    torch.distributed.init_process_group("nccl")
    ids = torch.randint(512, (2, 64), generator=torch.Generator().manual_seed(0)).cuda()
    exact, plain, apart = (
        adapted(rank, False, False),
        adapted(rank, False, False).bfloat16(),
        adapted(rank, True, compiled),
    )
    routes = note_routes(exact)
    exact(input_ids=ids, labels=ids).loss.backward()
    for model in (plain, apart):
        hold_routes(model, routes)
        model(input_ids=ids, labels=ids).loss.backward()
    return farthest(apart, exact), farthest(plain, exact)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("rank", [3, 16])
def test_lora_on_experts(rank: int, compiled: bool, nursery: Nursery) -> None:
    [(ours, theirs)] = Pool(nursery, 1).run(lora_errors, rank, compiled, trainer=True, timeout=120)
    assert ours < 1.5 * theirs
