"""Packed documents under cp where the model's config asks for a cache, as most published configs do."""

import copy
from typing import Any

import pytest
import torch

from lightning_automodel import FSDP2Config
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.testing.pool import Pool
from tests.exactness.test_sequence_parallel import restarting
from tests.support.families import tiny_model
from tests.support.training import whole

IDS = torch.randint(3, 100, (2, 16), generator=torch.Generator().manual_seed(0))
CALLS: dict[str, dict[str, Any]] = {
    "without a cache": {"position_ids": restarting(IDS), "use_cache": False},
    "with a mask": {"position_ids": restarting(IDS), "attention_mask": torch.ones_like(IDS)},
    "one document": {"position_ids": torch.arange(16).expand_as(IDS)},
}


def outcomes(config: dict[str, Any]) -> tuple[str, dict[str, float]]:
    """Runs on each rank: the refusal, and the largest error of a gradient of what is not refused."""
    reference = tiny_model("llama").train()
    reference.config.use_cache = True
    model = parallelize(copy.deepcopy(reference), build_mesh(resolve_sizes(2, cp=2), "cpu"), FSDP2Config(**config))
    with pytest.raises(ValueError, match="begin anew") as refusal:
        model(input_ids=IDS, labels=IDS, position_ids=restarting(IDS))
    errors = {}
    for name, call in CALLS.items():
        gradients = []
        for one in (reference, model):
            one.zero_grad()
            one(input_ids=IDS, labels=IDS, **call).loss.backward()
            gradients.append([whole(p.grad) for p in one.parameters()])
        errors[name] = max(float((a - e).norm() / e.norm()) for e, a in zip(*gradients, strict=True))
    return str(refusal.value), errors


@pytest.mark.parametrize("config", [{}, {"activation_checkpointing": True}, {"cp_exchange": "all_to_all"}])
def test_documents_are_apart_without_a_cache_only(config: dict[str, Any], pool2: Pool) -> None:
    for refusal, errors in pool2.run(outcomes, config):
        assert "LlamaModel" in refusal
        assert "Call the model with use_cache=False" in refusal
        assert {name: error for name, error in errors.items() if error > 1e-5} == {}
