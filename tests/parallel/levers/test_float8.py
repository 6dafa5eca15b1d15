"""Float8 in blocks, emulated on CPU: which layers, under which names, and numbers within what the format resolves."""

from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from lightning_automodel.config import FSDP2Config
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.testing.pool import Pool, RankFailed
from tests.parallel.levers.support import token_ids
from tests.support.families import tiny_model

pytest.importorskip("torchao")
SIZES = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 128}
CASES: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"tp": 2}, {"float8": "tensorwise", "sequence_parallel": True, "activation_checkpointing": "full"}),
    ({"tp": 2}, {"float8": "rowwise", "enable_compile": True, "compile_backend": "aot_eager"}),
    ({"dp_shard": 2}, {"float8": "rowwise_with_gw_hp", "activation_checkpointing": "selective"}),
]


def runs(cases: list[tuple[dict[str, int], dict[str, Any]]]) -> list[dict[str, Any]]:
    """Runs on each rank: float8 against float32 in the same layout, on the same batch on all ranks."""
    found = []
    for sizes, fields in cases:
        mesh = build_mesh(resolve_sizes(2, **sizes), "cpu")
        ids = token_ids()
        exact, model = (
            parallelize(tiny_model("llama", attention="sdpa", **SIZES), mesh, FSDP2Config(**f)).train()
            for f in ({}, fields)
        )
        losses = [m(input_ids=ids, labels=ids).loss for m in (exact, model)]
        for loss in losses:
            loss.backward()
        pairs = list(zip(exact.named_parameters(), model.named_parameters(), strict=True))
        assert all(one == two for (one, _), (two, _) in pairs)
        errors = [((p.grad - q.grad).norm() / q.grad.norm()).item() for (_, q), (_, p) in pairs]
        linears = {n: type(m).__name__ for n, m in model.named_modules() if isinstance(m, nn.Linear)}
        found.append(
            {
                "loss": ((losses[1] - losses[0]) / losses[0]).abs().item(),
                "gradient": max(errors),
                "float8": {n for n, kind in linears.items() if kind == "Float8Linear"} == linears.keys() - {"lm_head"},
            }
        )
    return found


@pytest.mark.slow
@pytest.mark.parametrize("cases", [CASES[:1], pytest.param(CASES[1:], marks=pytest.mark.long)], ids=["one", "others"])
def test_layers_and_numbers(pool2: Pool, cases: list[tuple[dict[str, int], dict[str, Any]]]) -> None:
    for ranks in pool2.run(runs, cases, timeout=110):
        for found in ranks:
            assert found["float8"]
            assert found["loss"] < 0.01
            assert 1e-3 < found["gradient"] < 0.3, found


def too_small() -> None:
    mesh = build_mesh(resolve_sizes(dist.get_world_size(), tp=2), "cpu")
    parallelize(tiny_model("llama", hidden_size=72), mesh, FSDP2Config(float8="rowwise"))


def test_refused(pool2: Pool) -> None:
    with pytest.raises(ValueError, match="float8='e4m3' is not one of torchao's recipes tensorwise, rowwise"):
        FSDP2Config(float8="e4m3")
    with pytest.raises(RankFailed, match=r"finds no linear layer in blocks of LlamaForCausalLM .* 16 x tp = 32"):
        pool2.run(too_small)
