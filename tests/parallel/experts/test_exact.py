"""Expert parallelism against one process: every gradient, over meshes, kernels and routes."""

import pytest

from lightning_automodel.config import FSDP2Config
from lightning_automodel.testing.pool import Pool
from tests.exactness.test_families import check, errors
from tests.support.comparison import Schedule
from tests.support.marks import with_long
from tests.support.run_family import Run

SCHEDULE = Schedule(steps=3, micro_batches=2, clip=0.5)
FAMILIES = ["qwen3_moe", "gpt_oss", "deepseek_v3", "nemotron_h", "llama4_text"]
EIGHT = {"num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8}  # two chunks of each rank, in strides
SIZES = {
    "dp_shard=4 x ep=2": {"dp_shard": 4, "ep": 2},
    "dp_shard=4 x ep=4": {"dp_shard": 4, "ep": 4},
    "dp_replicate=2 x dp_shard=2 x ep=2": {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
    "dp_shard=2 x tp=2 x ep=2": {"dp_shard": 2, "tp": 2, "ep": 2},
    "dp_shard=2 x cp=2 x ep=4": {"dp_shard": 2, "cp": 2, "ep": 4},
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", with_long(SIZES, *list(SIZES)[:3], list(SIZES)[4]))
def test_three_clipped_steps_of_two_micro_batches(layout: str, pool4: Pool) -> None:
    check(pool4.run(errors, {f: Run(sizes=SIZES[layout], schedule=SCHEDULE, changes=EIGHT) for f in FAMILIES}))


@pytest.mark.slow
@pytest.mark.parametrize("families", with_long([FAMILIES[1], " ".join(FAMILIES)], " ".join(FAMILIES)))
def test_sequence_parallelism_checkpointing_and_an_odd_number_of_tokens(families: str, pool4: Pool) -> None:
    config = FSDP2Config(sequence_parallel=True, activation_checkpointing=True)
    sizes = {"dp_shard": 2, "tp": 2, "ep": 2}
    runs = {f: Run(sizes=sizes, schedule=SCHEDULE, changes=EIGHT, config=config, ragged=True) for f in families.split()}
    check(pool4.run(errors, runs))
