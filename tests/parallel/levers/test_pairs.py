"""Levers together: a covering array of pairs, each row against one process; and the implementations of attention.

What a CPU refuses (activation_offload, enable_async_tensor_parallel, loss kernels) is in ``tests/gpu``; what only a
composite model has (tower_policy, scopes of towers) in ``tests/exactness``.
"""

import os
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

from lightning_automodel.config import FSDP2Config
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.testing.pool import Pool
from tests.parallel.levers.covering import Row, covering_rows, pairs_in, possible_pairs
from tests.parallel.levers.support import PAIR, token_ids
from tests.support.comparison import Schedule, compare
from tests.support.families import tiny_model
from tests.support.marks import with_long

SCHEDULE = Schedule(steps=1, length=12)  # two micro-batches
LAYERS = 4

NARROW = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
LEVERS: dict[str, dict[str, dict[str, Any]]] = {
    "layout": {
        "tp": {"tp": 2},
        "dp_shard": {"dp_shard": 2},
        "dp_replicate": {"dp_replicate": 2},
        "sp": {"tp": 2, "sequence_parallel": True},
    },
    "checkpointing": {
        "none": {},
        **{mode: {"activation_checkpointing": mode} for mode in ("full", "selective", "submodule")},
    },
    "scope": {"all": {}, "language": {"activation_checkpointing_scope": "language"}},
    "compile": {"off": {}, "on": {"enable_compile": True, "compile_backend": "aot_eager"}},
    "reshard": {"None": {}, "True": {"reshard_after_forward": True}, "False": {"reshard_after_forward": False}},
    "prefetch": {
        "default": {},
        "off": {"enable_fsdp2_prefetch": False},
        "depths": {"fsdp2_backward_prefetch_depth": 1, "fsdp2_forward_prefetch_depth": 2},
    },
    "units": {"blocks": {}, "pairs": {"fsdp2_min_num_params": PAIR}},
    "gradients": {"deferred": {}, "reduced": {"defer_fsdp_grad_sync": False}},
    "loss": {"whole": {}, "chunked": {"chunked_loss": 8}},
    "offload": {"off": {}, "on": {"offload_policy": True}},
    "precision": {
        "float32": {},
        "bfloat16": {"mp_policy": NARROW},
        "wide stream": {"mp_policy": {**NARROW, "output_dtype": "float32"}, "autocast_dtype": "bfloat16"},
        "float8": {"float8": "rowwise"},
    },
}
COLUMNS = {name: list(values) for name, values in LEVERS.items()}
REFUSED: list[Row] = [{"checkpointing": "none", "scope": "language"}]  # a scope of nothing
ROWS = covering_rows(COLUMNS, REFUSED)
ERRORS: dict[str, tuple[float, float]] = {
    "float32": (0.0, 1e-5),
    # Something is lost, and no more than the format loses: of a sum that is missing over two ranks a half would be.
    "bfloat16": (0.01, 0.03),
    "wide stream": (0.01, 0.03),
    "float8": (0.05, 0.25),
}
"""Between which the largest relative error of a gradient lies, by precision."""


def fields_of(row: Row) -> dict[str, Any]:
    """What the values of ``row`` set: sizes of the mesh, and fields of ``FSDP2Config``."""
    return {name: value for column, chosen in row.items() for name, value in LEVERS[column][chosen].items()}


def test_every_pair_is_covered() -> None:
    seen = {pair for row in ROWS for pair in pairs_in(row)}
    assert seen == possible_pairs(COLUMNS, REFUSED)
    assert len(ROWS) <= 20
    for row in REFUSED:
        with pytest.raises(ValueError, match="does nothing without"):
            FSDP2Config(**fields_of(row))


def errors(rows: list[Row]) -> list[tuple[float, str]]:
    """Runs on each rank: the largest errors, and what has them."""
    found = []
    for row in rows:
        fields = fields_of(row)
        sizes = {name: fields.pop(name) for name in ("tp", "dp_shard", "dp_replicate") if name in fields}
        build = partial(tiny_model, "llama", attention="sdpa", num_hidden_layers=LAYERS)
        error, where = compare(build, sizes, int(os.environ["WORLD_SIZE"]), SCHEDULE, FSDP2Config(**fields)).largest
        found.append((error, f"{error:.1e} in {where} with {row}"))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("layout", with_long(LEVERS["layout"], "dp_replicate", "dp_shard", "sp"))
def test_pairs_are_exact(layout: str, pool2: Pool) -> None:
    installed = find_spec("torchao") is not None
    rows = [row for row in ROWS if row["layout"] == layout and (installed or row["precision"] != "float8")]
    for found in pool2.run(errors, rows, timeout=110):
        for row, (error, where) in zip(rows, found, strict=True):
            least, most = ERRORS[row["precision"]]
            assert least <= error <= most, where


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


@pytest.mark.long
def test_implementations_of_attention(pool2: Pool) -> None:
    for found in pool2.run(attention_errors, timeout=110):
        assert len(found) == 6
        assert [where for error, where in found if error > 1e-5] == []
