"""Units that are no single block (large vocabularies, several small blocks): same numbers, and what is whole when."""

from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_automodel.config import FSDP2Config
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.modules import structure as blocks
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.testing.pool import Pool
from tests.parallel.levers.support import is_whole, token_ids
from tests.support.comparison import Schedule, compare
from tests.support.families import tiny_model

ONE_UNIT = {"fsdp2_min_num_params": 10**9}
CASES: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("llama", {"dp_shard": 2}, {"chunked_loss": 8, "reshard_after_forward": True}),
    ("llama", {"tp": 2}, {"chunked_loss": 8, "sequence_parallel": True}),
    ("gemma3_text", {"tp": 2}, {}),
    ("gemma3n_text", {"dp_shard": 2}, {"reshard_after_forward": True}),
    ("qwen3", {"dp_shard": 2}, {"reshard_after_forward": False, "activation_checkpointing": "full"}),
    ("mixtral", {"dp_replicate": 2}, {"mp_policy": {"output_dtype": "float32"}}),
    # both blocks in one unit: of one kind, of two kinds, and of a kind that runs several times in a forward pass
    ("llama", {"dp_shard": 2}, {**ONE_UNIT, "reshard_after_forward": True}),
    ("qwen3_5_text", {"dp_shard": 2}, {**ONE_UNIT, "activation_checkpointing": "submodule"}),
    ("hrm_text", {"dp_shard": 2}, {**ONE_UNIT, "reshard_after_forward": True}),
]


def untied(family: str) -> nn.Module:
    return tiny_model(family, attention="sdpa", tie_word_embeddings=False)


def errors(cases: list[tuple[str, dict[str, int], dict[str, Any]]]) -> list[tuple[float, str]]:
    """Runs on each rank."""
    blocks.LARGE = 0
    found = []
    for family, sizes, fields in cases:
        schedule = Schedule(steps=2, length=12)
        error, where = compare(partial(untied, family), sizes, 2, schedule, FSDP2Config(**fields)).largest
        found.append((error, f"{where} of {family}, {sizes}, {fields}"))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("cases", [CASES[::3], pytest.param(CASES, marks=pytest.mark.long)], ids=["some", "all"])
def test_numbers_are_those_of_one_process(pool2: Pool, cases: list[tuple[str, dict[str, int], dict[str, Any]]]) -> None:
    for found in pool2.run(errors, cases, timeout=110):
        assert [where for error, where in found if error > 1e-5] == []


def held() -> dict[str, Any]:
    """Runs on each rank: whether embedding and head are whole as each block starts, in both directions."""
    blocks.LARGE = 0
    mesh = build_mesh(resolve_sizes(dist.get_world_size(), dp_shard=2), "cpu")
    tied = parallelize(tiny_model("llama", tie_word_embeddings=True), mesh)
    model: Any = parallelize(untied("llama"), mesh).train()
    found: dict[str, Any] = {"forward": [], "backward": []}

    def note(direction: str) -> None:
        found[direction].append((is_whole(model.model.embed_tokens), is_whole(model.lm_head)))

    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda *_: note("forward"))
        layer.register_forward_hook(lambda m, args, output: output.register_hook(lambda _: note("backward")) and None)
    ids = token_ids()
    model(input_ids=ids, labels=ids).loss.backward()
    found["tied"] = isinstance(tied.get_submodule("lm_head"), FSDPModule)
    return found


def test_what_is_whole(pool2: Pool) -> None:
    # The last of two blocks has asked for the head; before the backward pass of blocks begins, the head's is over.
    expected = {"forward": [(False, False), (False, True)], "backward": [(False, False)] * 2, "tied": False}
    assert pool2.run(held) == [expected] * 2
