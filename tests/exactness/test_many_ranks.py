"""Meshes of three and four axes at once, on eight and sixteen ranks, against one process."""

from pathlib import Path

import pytest

from lightning_automodel.config import FSDP2Config
from lightning_automodel.testing.pool import Nursery, Pool
from tests.checkpointing.test_resume import STEPS_PER_EPOCH, furthest, train
from tests.exactness.test_families import check, errors
from tests.parallel.experts.test_exact import EIGHT
from tests.support.comparison import Schedule
from tests.support.marks import with_long
from tests.support.run_family import Run

SCHEDULE = Schedule(steps=2, micro_batches=2, clip=0.5)
IN_SEQUENCE = FSDP2Config(sequence_parallel=True, activation_checkpointing=True)
DENSE, EXPERTS = ["llama", "gemma3_text"], ["qwen3_moe", "deepseek_v3", "gpt_oss"]
ALL_AXES = {"dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 2}
OF_EIGHT = {
    "dp_shard=2 x cp=2 x tp=2": {"dp_shard": 2, "cp": 2, "tp": 2},
    "dp_replicate=2 x dp_shard=2 x tp=2": {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
    "dp_replicate=2 x dp_shard=2 x cp=2": {"dp_replicate": 2, "dp_shard": 2, "cp": 2},
    "dp_shard=2 x tp=4": {"dp_shard": 2, "tp": 4},
    "cp=8": {"cp": 8},
}
WITH_EXPERTS = {
    "dp_shard=2 x cp=2 x tp=2, ep=4": {"dp_shard": 2, "cp": 2, "tp": 2, "ep": 4},
    "dp_shard=4 x tp=2, ep=4": {"dp_shard": 4, "tp": 2, "ep": 4},
    "dp_shard=4 x cp=2, ep=8": {"dp_shard": 4, "cp": 2, "ep": 8},
    "dp_replicate=2 x dp_shard=4, ep=2": {"dp_replicate": 2, "dp_shard": 4, "ep": 2},
}


@pytest.fixture(scope="module")
def pool8(nursery: Nursery) -> Pool:
    return Pool(nursery, 8)


@pytest.mark.slow
@pytest.mark.parametrize("layout", with_long(OF_EIGHT, *list(OF_EIGHT)[1:]))
def test_eight_ranks(layout: str, pool8: Pool) -> None:
    config = IN_SEQUENCE if "tp" in OF_EIGHT[layout] else FSDP2Config()
    runs = {f: Run(sizes=OF_EIGHT[layout], schedule=SCHEDULE, config=config, ragged=True) for f in DENSE}
    check(pool8.run(errors, runs))


@pytest.mark.long
@pytest.mark.parametrize("layout", WITH_EXPERTS)
def test_experts_on_eight_ranks(layout: str, pool8: Pool) -> None:
    config = IN_SEQUENCE if "tp" in WITH_EXPERTS[layout] else FSDP2Config()
    runs = {f: Run(sizes=WITH_EXPERTS[layout], schedule=SCHEDULE, config=config, changes=EIGHT) for f in EXPERTS}
    check(pool8.run(errors, runs))


@pytest.mark.long
def test_all_axes_at_once(nursery: Nursery) -> None:
    runs = {f: Run(sizes=ALL_AXES, schedule=SCHEDULE, config=IN_SEQUENCE) for f in DENSE[:1]}
    runs |= {
        f: Run(sizes={**ALL_AXES, "ep": 4}, schedule=SCHEDULE, config=IN_SEQUENCE, changes=EIGHT) for f in EXPERTS[:1]
    }
    check(Pool(nursery, 16).run(errors, runs, timeout=240))


@pytest.mark.long
def test_eight_ranks_go_on_as_four_and_as_one(nursery: Nursery, pool4: Pool, pool8: Pool, tmp_path: Path) -> None:
    sizes = {"dp_replicate": 2, "dp_shard": 2, "tp": 2}
    whole = pool8.run(train, sizes, tmp_path / "a", 3, trainer=True)[0]
    four = pool4.run(train, {"tp": 2}, tmp_path / "b", 2, resume=tmp_path / "a/epoch=0.ckpt", trainer=True)[0]
    one = Pool(nursery, 1).run(train, {}, tmp_path / "c", 3, resume=tmp_path / "b/epoch=1.ckpt", trainer=True)[0]
    assert [*four["losses"], *one["losses"]] == pytest.approx(whole["losses"][STEPS_PER_EPOCH:], abs=1e-6)
    assert furthest(one["parameters"], whole["parameters"]) < 1e-5
