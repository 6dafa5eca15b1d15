"""Levers together: a covering array of pairs, each row against one process; and the implementations of attention."""

import os
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from lightning_automodel.config import FSDP2Config
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallelizer import parallelize
from tests.harness.pool import Pool
from tests.levers.support import token_ids
from tests.support.comparison import Schedule, compare
from tests.support.families import tiny_model

SCHEDULE = Schedule(steps=1, length=12)

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2},
    "dp_shard": {"dp_shard": 2},
    "dp_replicate": {"dp_replicate": 2},
    "sp": {"tp": 2, "sequence_parallel": True},
}
LEVERS: dict[str, list[Any]] = {
    "activation_checkpointing": [False, "full", "selective", "submodule"],
    "enable_compile": [False, True],
    "reshard_after_forward": [None, True, False],
    "enable_fsdp2_prefetch": [True, False],
    "chunked_loss": [None, 8],
    "offload_policy": [None, True],
}

# layout, and the value of each lever by its place above: every pair of values, of two levers or of a lever and a
# layout, stands in a row
ROWS: list[tuple[str, int, int, int, int, int, int]] = [
    ("tp", 0, 0, 0, 0, 0, 0),
    ("tp", 1, 1, 1, 1, 1, 1),
    ("tp", 2, 0, 2, 1, 0, 1),
    ("tp", 3, 1, 0, 0, 1, 1),
    ("dp_shard", 0, 1, 2, 0, 1, 1),
    ("dp_shard", 1, 0, 0, 1, 0, 0),
    ("dp_shard", 2, 1, 1, 0, 1, 0),
    ("dp_shard", 3, 0, 1, 1, 0, 0),
    ("dp_replicate", 0, 0, 1, 1, 1, 1),
    ("dp_replicate", 1, 1, 2, 0, 0, 0),
    ("dp_replicate", 2, 1, 0, 1, 1, 0),
    ("dp_replicate", 3, 0, 2, 0, 1, 0),
    ("sp", 0, 1, 1, 0, 0, 1),
    ("sp", 1, 0, 0, 0, 1, 0),
    ("sp", 2, 0, 2, 0, 1, 0),
    ("sp", 3, 1, 2, 1, 0, 0),
]


def test_every_pair_is_covered() -> None:
    columns = [list(LAYOUTS), *(range(len(values)) for values in LEVERS.values())]
    for i, one in enumerate(columns):
        for j, two in enumerate(columns[:i]):
            seen = {(row[i], row[j]) for row in ROWS}
            assert seen == {(a, b) for a in one for b in two}, (i, j)


def errors(rows: list[tuple]) -> list[tuple[float, str]]:
    """Runs on each rank."""
    found = []
    for layout, *values in rows:
        sizes = dict(LAYOUTS[layout])
        fields = {name: LEVERS[name][value] for name, value in zip(LEVERS, values, strict=True)}
        fields["sequence_parallel"] = sizes.pop("sequence_parallel", False)
        if fields["enable_compile"]:
            fields["compile_backend"] = "aot_eager"
        build = partial(tiny_model, "llama", attention="sdpa")
        error, where = compare(build, sizes, int(os.environ["WORLD_SIZE"]), SCHEDULE, FSDP2Config(**fields)).largest
        found.append((error, f"{where} with {layout} {fields}"))
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pairs_are_exact(layout: str, pool2: Pool) -> None:
    for found in pool2.run(errors, [row for row in ROWS if row[0] == layout], timeout=110):
        assert [where for error, where in found if error > 1e-5] == []


def build(implementation: str) -> nn.Module:
    return tiny_model("gemma3_text", attention=implementation, layer_types=["sliding_attention", "full_attention"])


def attention_errors() -> list[tuple[float, str]]:
    """Runs on each rank. FlexAttention has no backward pass on CPU, so its logits are compared."""
    found = []
    mesh = build_mesh(resolve_sizes(2, tp=2), "cpu")
    for cut in (False, True):
        for implementation in ("eager", "sdpa"):
            config = FSDP2Config(sequence_parallel=cut, activation_checkpointing="selective")
            error, where = compare(partial(build, implementation), {"tp": 2}, 2, SCHEDULE, config).largest
            found.append((error, f"{where} with {implementation}, {cut}"))
        with torch.no_grad():
            flex = parallelize(build("flex_attention"), mesh, FSDP2Config(sequence_parallel=cut))
            logits, expected = (model.eval()(token_ids()).logits for model in (flex, build("sdpa")))
        assert "flex" in flex.config._attn_implementation  # type: ignore[union-attr, operator]
        found.append(((logits - expected).norm().item() / expected.norm().item(), f"logits with flex_attention, {cut}"))
    return found


def test_implementations_of_attention(pool2: Pool) -> None:
    for found in pool2.run(attention_errors, timeout=110):
        assert len(found) == 6
        assert [where for error, where in found if error > 1e-5] == []
