"""Whole blocks in ``modules_to_save`` of peft: each copy runs on the stream as the block does."""

from typing import Any

import pytest
import torch

from lightning_automodel.config import FSDP2Config
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.testing.pool import Pool
from tests.support.adapted import adapted, adapter_error
from tests.support.comparison import Schedule

BOUND = 1e-5
SCHEDULE = Schedule(steps=2, length=13)
SEQUENCE = {"sequence_parallel": True}
ROUTED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "norms see slices": ("llama", SEQUENCE, {}),
    "recomputed": ("llama", {**SEQUENCE, "activation_checkpointing": True}, {}),
    "recorded router logits": ("mixtral", {}, ROUTED),
}


def errors(sizes: dict[str, int], cases: tuple[str, ...]) -> dict[str, tuple[float, str]]:
    """Runs on each rank: the largest error of each case against one process."""
    found = {}
    for name in cases:
        family, config, changes = CASES[name]
        found[name] = adapter_error(family, "saved block", sizes, SCHEDULE, FSDP2Config(**config), **changes)
    return found


@pytest.mark.slow
def test_copies_are_exact(pool2: Pool) -> None:
    for found in pool2.run(errors, {"tp": 2}, tuple(CASES)):
        assert {name: error for name, error in found.items() if error[0] > BOUND} == {}


@pytest.mark.slow
def test_copies_that_are_sharded_are_exact(pool4: Pool) -> None:
    cases = ("norms see slices", "recorded router logits")
    for found in pool4.run(errors, {"dp_shard": 2, "tp": 2}, cases):
        assert {name: error for name, error in found.items() if error[0] > BOUND} == {}


def losses_of_the_base() -> list[float]:
    """Runs on each rank: of one process, and of the mesh, where the block runs that its copy stands for."""
    models = [adapted("llama", "saved block").eval() for _ in range(2)]
    parallelize(models[1], build_mesh(resolve_sizes(2, tp=2), "cpu"), FSDP2Config(**SEQUENCE))
    ids = torch.randint(3, 90, (2, 13), generator=torch.Generator().manual_seed(0))
    found = []
    for model in models:
        with model.disable_adapter(), torch.no_grad():
            found.append(float(model(input_ids=ids, labels=ids).loss))
    return found


def test_the_block_itself_runs_while_adapters_are_off(pool2: Pool) -> None:
    for expected, found in pool2.run(losses_of_the_base):
        assert found == pytest.approx(expected, rel=BOUND)
