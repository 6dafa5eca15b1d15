"""How many collectives a step costs, and how many bytes they move, against the numbers that the design promises."""

from collections import Counter
from typing import Any

import pytest
import torch.distributed as dist

from lightning_automodel.config import FSDP2Config
from lightning_automodel.mesh import DP_REPLICATE, DP_SHARD_CP, TP, axis, build_mesh, resolve_sizes
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.testing.pool import Pool
from tests.parallel.levers.collectives import Collectives
from tests.parallel.levers.support import BLOCK, LENGTH, PAIR, ROWS, is_whole, token_ids
from tests.support.families import tiny_model
from tests.support.marks import OLD_FSDP2

STREAM = ROWS * LENGTH * 96 * 4  # bytes of the residual stream
GATHER = 4 * BLOCK  # bytes of a block's parameters
NORM = 96 * 4
PARAMETERS = 9  # of a block


def per_block(sizes: dict[str, int], fields: dict[str, Any], micro_batches: int) -> dict[str, dict[str, float]]:
    """Runs on each rank: what a block adds to a step. What embedding, head and loss cost drops out."""
    few, many = (step(layers, sizes, fields, micro_batches) for layers in (2, 4))
    keys = sorted(many["count"])
    return {
        key: {name: (many[name][key] - few[name][key]) / 2 for name in many}
        for key in keys
        if many["count"][key] > few["count"][key]
    }


def step(layers: int, sizes: dict[str, int], fields: dict[str, Any], micro_batches: int) -> dict[str, Counter[str]]:
    mesh = build_mesh(resolve_sizes(dist.get_world_size(), **sizes), "cpu")
    model: Any = parallelize(tiny_model("llama", num_hidden_layers=layers), mesh, FSDP2Config(**fields)).train()
    ids = token_ids()
    with Collectives({name: axis(mesh, name).get_group() for name in (DP_REPLICATE, DP_SHARD_CP, TP)}) as counter:
        for i in range(micro_batches):
            model.set_requires_gradient_sync(i == micro_batches - 1)
            counter.direction = "forward"
            loss = model(input_ids=ids, labels=ids).loss
            counter.direction = "backward"
            loss.backward()
    return counter.found


def whole_stream(count: float) -> dict[str, float]:
    return {"count": count, "bytes": count * STREAM}


def whole_block(count: float) -> dict[str, float]:
    return {"count": count, "bytes": count * GATHER}


def reduced_block(count: float, ranks: int) -> dict[str, float]:
    """With a flag of each parameter to each rank, which says whether there is a gradient."""
    return {"count": count, "bytes": GATHER + 4 * PARAMETERS * ranks}


def gathered_and_reduced(ranks: int = 2) -> dict[str, Any]:
    return {
        "forward all-gather dp_shard_cp": whole_block(1),
        "backward reduce-scatter dp_shard_cp": reduced_block(1, ranks),
    }


GATHERED = gathered_and_reduced()
IN_PAIRS = {
    key: {"count": 1 / 2, "bytes": costs["bytes"]}
    for key, costs in {**GATHERED, "backward all-gather dp_shard_cp": whole_block(1)}.items()
}
CASES: list[tuple[dict[str, int], dict[str, Any], int, dict[str, Any]]] = [
    (
        {"tp": 2},
        {},
        1,
        {"forward all-reduce tp": whole_stream(2), "backward all-reduce tp": whole_stream(2)},
    ),
    (
        {"tp": 2},
        {"sequence_parallel": True},
        1,
        {
            **{
                f"{direction} {kind} tp": whole_stream(2)
                for direction in ("forward", "backward")
                for kind in ("all-gather", "reduce-scatter")
            },
            "backward all-reduce tp": {"count": 2, "bytes": 2 * NORM},  # gradients of what each rank uses on its slice
        },
    ),
    (  # the second sum of a block is its output, and not needed to compute inside of it again
        {"tp": 2},
        {"activation_checkpointing": "full"},
        1,
        {"forward all-reduce tp": whole_stream(2), "backward all-reduce tp": whole_stream(2 + 1)},
    ),
    ({"dp_shard": 2}, {}, 1, {**GATHERED, "backward all-gather dp_shard_cp": whole_block(1)}),
    ({"dp_shard": 2}, {"reshard_after_forward": False}, 1, GATHERED),
    (  # the same bytes, in half as many collectives; before torch 2.13 a pair is reduced behind each of the two
        {"dp_shard": 2},
        {"fsdp2_min_num_params": PAIR},
        1,
        {
            key: {name: value * (2 if OLD_FSDP2 and "reduce" in key else 1) for name, value in costs.items()}
            for key, costs in IN_PAIRS.items()
        },
    ),
    (  # gradients are reduced once, while parameters are gathered for every micro-batch
        {"dp_shard": 2},
        {},
        2,
        {
            "forward all-gather dp_shard_cp": whole_block(2),
            "backward all-gather dp_shard_cp": whole_block(2),
            "backward reduce-scatter dp_shard_cp": reduced_block(1, 2),
        },
    ),
    (
        {"dp_replicate": 2},
        {},
        1,
        {"backward all-reduce dp_replicate": reduced_block(1, 1)},
    ),
]


def all_cases() -> list[dict[str, Any]]:
    """Runs on each rank."""
    return [per_block(sizes, fields, micro) for sizes, fields, micro, _ in CASES]


@pytest.mark.slow
def test_what_a_block_costs(pool2: Pool) -> None:
    for found in pool2.run(all_cases):
        for (sizes, fields, micro, expected), actual in zip(CASES, found, strict=True):
            assert actual == expected, (sizes, fields, micro)


# ---- gathered ahead of use, and held ---------------------------------------------------------------------------------


def gathered(fields: dict[str, Any]) -> dict[str, list[int]]:
    """Runs on each rank: how many blocks have been asked for when each one starts, and are whole in memory then."""
    world = dist.get_world_size()
    mesh = build_mesh(resolve_sizes(world, dp_shard=world), "cpu")
    model: Any = parallelize(tiny_model("llama", num_hidden_layers=4), mesh, FSDP2Config(**fields)).train()
    layers = model.model.layers
    found: dict[str, list[int]] = {"forward": [], "backward": [], "held": []}
    counter = Collectives({name: axis(mesh, name).get_group() for name in (DP_REPLICATE, DP_SHARD_CP, TP)})

    def note(direction: str) -> None:
        count = sum(n for key, n in counter.found["count"].items() if key.startswith(f"{direction} all-gather"))
        found[direction].append(count - 1 if direction == "forward" else count)  # the root comes before all blocks
        found["held"].append(sum(map(is_whole, layers)))

    for layer in layers:
        layer.register_forward_pre_hook(lambda *_: note("forward"))
        layer.register_forward_hook(lambda m, args, output: output.register_hook(lambda _: note("backward")) and None)
    ids = token_ids()
    with counter:
        loss = model(input_ids=ids, labels=ids).loss
        found["held"].append(sum(map(is_whole, layers)))
        counter.direction = "backward"
        loss.backward()
    found["held"].append(sum(map(is_whole, layers)))
    return found


# asked for in the forward pass, in the backward pass; whole as blocks 0 1 2 3 start, after the forward pass, as blocks
# 3 2 1 0 start in the backward pass, and in the end
SCHEDULES: list[tuple[dict[str, Any], list[int], list[int], list[int]]] = [
    (
        {"fsdp2_forward_prefetch_depth": 1, "fsdp2_backward_prefetch_depth": 2},
        [2, 3, 4, 4],
        [2, 3, 3, 3],
        [2, 2, 2, 1, 1, 3, 3, 2, 1, 0],
    ),
    (
        {"fsdp2_forward_prefetch_depth": 3, "fsdp2_backward_prefetch_depth": 1},
        [4, 4, 4, 4],
        [1, 2, 3, 3],
        [4, 3, 2, 1, 1, 2, 2, 2, 1, 0],
    ),
    # FSDP2 itself asks for one block ahead in the backward pass
    ({"enable_fsdp2_prefetch": False}, [1, 2, 3, 4], [1, 2, 3, 3], [1, 1, 1, 1, 1, 2, 2, 2, 1, 0]),
    ({"reshard_after_forward": True}, [2, 3, 4, 4], [3, 4, 4, 4], [2, 2, 2, 1, 0, 3, 3, 2, 1, 0]),
    ({"reshard_after_forward": False}, [2, 3, 4, 4], [0, 0, 0, 0], [2, 3, 4, 4, 4, 4, 3, 2, 1, 0]),
    # two units of two blocks
    ({"fsdp2_min_num_params": PAIR}, [2, 2, 2, 2], [1, 1, 1, 1], [4, 4, 2, 2, 2, 4, 4, 2, 2, 0]),
    (
        {"fsdp2_min_num_params": PAIR, "reshard_after_forward": True, "enable_fsdp2_prefetch": False},
        [1, 1, 2, 2],
        [2, 2, 2, 2],
        [2, 2, 2, 2, 0, 4, 4, 2, 2, 0],
    ),
]


@pytest.mark.slow
def test_blocks_are_gathered_ahead_and_freed(pool2: Pool) -> None:
    for fields, forward, backward, held in SCHEDULES:
        expected = {"forward": forward, "backward": backward, "held": held}
        assert pool2.run(gathered, fields) == [expected] * 2, fields


@pytest.mark.slow
def test_pairs_of_ranks_hold_blocks_between_the_passes(pool4: Pool) -> None:
    fields: dict[str, Any] = {"reshard_after_forward": 2}
    (as_true,) = (row for row in SCHEDULES if row[0] == {"reshard_after_forward": True})
    for found in pool4.run(gathered, fields):
        assert (found["forward"], found["backward"], found["held"]) == as_true[1:]
    for costs in pool4.run(per_block, {"dp_shard": 4}, fields, 1):
        assert costs == {
            **gathered_and_reduced(4),
            "backward all-gather other": whole_block(1),
        }  # over two ranks, not four
