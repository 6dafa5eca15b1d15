"""The static layout against the oracle, which derives placements and collectives from a forward pass alone."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate

from lightning_automodel.mesh import TP, axis, build_mesh, resolve_sizes
from lightning_automodel.plans import Layout, ModuleLayout, derive_layout, select_plan
from lightning_automodel.plans.styles import Enter, Leave
from lightning_automodel.testing.pool import Pool
from tests.support.comparison import Schedule, batches
from tests.support.families import tiny_model
from tests.support.oracle import Findings, examine
from tests.support.run_oracle import verdicts

FAMILIES = [
    "apertus",
    "deepseek_v3",
    "doge",
    "gemma3_text",
    "gpt_oss",
    "llama",
    "longcat_flash",
    "mixtral",
    "olmo2",
    "phi3",
    "qwen2_5_vl",
    "qwen3",
    "qwen3_5_text",
    "qwen3_moe",
]


@pytest.mark.slow
def test_layout_and_oracle_agree(pool2: Pool) -> None:
    for found in pool2.run(verdicts, FAMILIES):
        assert {name: verdict for name, verdict in found.items() if not verdict.agrees} == {}
        assert all(verdict.parameters > 0 for verdict in found.values())


# ---- the oracle notices --------------------------------------------------------------------------------------------


def mistaken(change: Callable[[Layout], None]) -> tuple[list[str], dict[str, str]]:
    """Runs on each rank: what the oracle says of Qwen3 with a changed layout."""
    mesh = build_mesh(resolve_sizes(2, tp=2), "cpu")
    model = tiny_model("qwen3").train()
    layout = derive_layout(model, select_plan(model), 2)
    change(layout)
    torch.manual_seed(0)
    findings: Findings = examine(model, axis(mesh, TP), layout, batches(Schedule(), 0, 0)[0])
    return sorted(findings.problems), findings.mismatches(layout)


def whole_q_norm(layout: Layout) -> None:
    name = "model.layers.0.self_attn.q_norm.weight"
    layout.parameters[name] = replace(layout.parameters[name], gradient=Replicate())


def partial_norm(layout: Layout) -> None:
    layout.parameters["model.norm.weight"] = replace(layout.parameters["model.norm.weight"], gradient=Partial())


def no_copy(layout: Layout) -> None:
    layout.modules["model.layers.0.self_attn"] = ModuleLayout(Enter.NONE, Leave.REDUCE)


def second_copy(layout: Layout) -> None:
    layout.modules["model.layers.0.self_attn.q_norm"] = ModuleLayout(Enter.COPY, Leave.NONE)


def no_sum(layout: Layout) -> None:
    layout.modules["model.layers.0.mlp"] = ModuleLayout(Enter.COPY_ALL, Leave.NONE)


def second_sum(layout: Layout) -> None:
    layout.modules["model.norm"] = ModuleLayout(Enter.NONE, Leave.REDUCE)


@pytest.mark.parametrize(
    ("change", "problem", "mismatch"),
    [
        (whole_q_norm, "", "model.layers.0.self_attn.q_norm.weight"),
        (partial_norm, "", "model.norm.weight"),
        (no_copy, "missing copy-in before linear at model.layers.*.self_attn.q_proj", ""),
        (second_copy, "CopyIn of a varying value at model.layers.*.self_attn.q_norm", ""),
        (no_sum, "missing copy-in before add at model.layers.*", ""),
        (second_sum, "ReduceOut of a whole value at model", ""),
    ],
)
def test_the_oracle_notices(change: Callable[[Layout], None], problem: str, mismatch: str, pool2: Pool) -> None:
    for problems, mismatches in pool2.run(mistaken, change):
        assert not problem or problem in problems
        assert not mismatch or mismatch in mismatches
