"""Adapters with every switch of a mesh: every gradient of every factor is that of plain peft on one process."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_automodel.config import FSDP2Config
from lightning_automodel.distributed.shards import local_tensor
from lightning_automodel.mesh import DP, axis, build_mesh, resolve_sizes
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.testing.pool import Pool
from tests.parallel.levers.collectives import Collectives
from tests.support.adapted import adapted, adapter_error
from tests.support.comparison import Schedule, batches

BOUND = 1e-5
SECONDS = 240.0
SCHEDULE = Schedule(steps=2, length=13)
SEQUENCE = {"sequence_parallel": True}
COMPILED = {"enable_compile": True, "compile_backend": "aot_eager"}
MESH = {"dp_shard": 2, "tp": 2}
Case = tuple[str, str, dict[str, int], dict[str, Any]]
QUICK: dict[str, Case] = {
    "replicas": ("llama", "all-linear", {"dp_replicate": 2, "tp": 2}, {}),
    "checkpointing": ("llama", "dropout", MESH, {"activation_checkpointing": True, **SEQUENCE}),
    "chunked loss": ("llama", "saved", MESH, {"chunked_loss": 7, **SEQUENCE}),
    "context": ("llama", "all-linear", {"cp": 2, "tp": 2}, SEQUENCE),
}
MORE: dict[str, Case] = {
    "replicas of shards": ("llama", "dora", {"dp_replicate": 2, "dp_shard": 2}, {}),
    "compile": ("llama", "all-linear", MESH, COMPILED),
    "compiled sequence": ("llama", "all-linear", {"dp_replicate": 2, "tp": 2}, {**COMPILED, **SEQUENCE}),
    "fused": ("phi3", "dropout", MESH, SEQUENCE),
    "fused dora": ("glm4", "dora", MESH, SEQUENCE),
    "experts": ("mixtral", "experts", {"dp_replicate": 2, "tp": 2}, {"activation_checkpointing": True}),
    "submodules": ("gemma3_text", "dropout", MESH, {"activation_checkpointing": "submodule", **SEQUENCE}),
    "whole head": ("llama", "saved", {"dp_shard": 4}, {"chunked_loss": 7}),
    "context shards": ("phi3", "all-linear", {"cp": 2, "dp_shard": 2}, {}),
}


def errors(cases: list[Case]) -> list[tuple[float, str]]:
    """Runs on each rank."""
    return [
        adapter_error(family, method, sizes, SCHEDULE, FSDP2Config(**config)) for family, method, sizes, config in cases
    ]


def check(pool: Pool, cases: dict[str, Case]) -> None:
    for found in pool.run(errors, list(cases.values()), timeout=SECONDS):
        for name, largest in zip(cases, found, strict=True):
            assert largest[0] <= BOUND, (name, largest)


@pytest.mark.long
def test_switches_are_exact(pool4: Pool) -> None:
    check(pool4, QUICK)


@pytest.mark.long
@pytest.mark.parametrize("name", MORE)
def test_more_switches_are_exact(name: str, pool4: Pool) -> None:
    check(pool4, {name: MORE[name]})


def refusal_of_head() -> str:
    """Runs on each rank."""
    with pytest.raises(ValueError, match="leave the head out of what is adapted") as refusal:
        adapter_error("llama", "ends", {"tp": 2}, SCHEDULE, FSDP2Config(chunked_loss=7))
    return str(refusal.value)


def test_a_loss_without_logits_of_an_adapted_head_is_refused(pool2: Pool) -> None:
    for found in pool2.run(refusal_of_head):
        assert "or name it in modules_to_save, or use chunked_loss=None" in found


def reduced_and_trained(sizes: dict[str, int]) -> dict[str, Any]:
    """Runs on each rank: bytes in reductions over data ranks, and those of the gradients of adapters, each with a flag
    that says whether a rank has it.
    """
    model = adapted("llama", "all-linear")
    mesh = build_mesh(resolve_sizes(dist.get_world_size(), **sizes), "cpu")
    parallelize(model.get_base_model(), mesh)
    data = axis(mesh, DP)
    (batch,) = batches(Schedule(micro_batches=1, length=13), 0, data.get_local_rank())
    loss = model(**batch).loss
    with Collectives({}) as collectives:
        loss.backward()
    held = torch.tensor([local_tensor(p).numel() for p in model.parameters() if p.requires_grad])
    dist.all_reduce(held, group=data.get_group())
    return {
        "reduced": sum(n for kind, n in collectives.found["bytes"].items() if "reduce-scatter" in kind),
        "trained": (int(held.sum()) + len(held) * data.size()) * torch.float32.itemsize,
        "frozen": [n for n, p in model.named_parameters() if not p.requires_grad and p.grad is not None],
    }


@pytest.mark.slow
def test_the_frozen_base_is_in_no_reduction(pool4: Pool) -> None:
    for found in pool4.run(reduced_and_trained, MESH):
        assert found["reduced"] == found["trained"] > 0
        assert found["frozen"] == []
