"""Whole experts over tp, by the plan that transformers publishes for them: every gradient of one process."""

import pytest

from lightning_automodel.config import FSDP2Config
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.testing.pool import Pool, RankFailed
from tests.exactness.test_families import check, errors
from tests.parallel.experts.test_exact import EIGHT
from tests.support.comparison import Schedule
from tests.support.families import tiny_model
from tests.support.marks import with_long
from tests.support.run_family import Run

FAMILIES = ("qwen3_moe", "gpt_oss", "deepseek_v3", "nemotron_h")


def plan(family: str) -> dict[str, str]:
    """The model's own plan, with whole experts."""
    return {"extends": "model", **tiny_model(family).ep_plan}


@pytest.mark.slow
@pytest.mark.parametrize("kind", with_long(["tp=2", "dp_shard=2 x tp=2"], "dp_shard=2 x tp=2"))
def test_it_is_exact(kind: str, pool2: Pool, pool4: Pool) -> None:
    levers = {} if kind == "tp=2" else {"sequence_parallel": True, "activation_checkpointing": True}
    sizes = {"tp": 2} if kind == "tp=2" else {"dp_shard": 2, "tp": 2}
    runs = {
        f: Run(
            sizes=sizes,
            schedule=Schedule(steps=2),
            changes=EIGHT,
            ragged=True,
            config=FSDP2Config(tp_plan=plan(f), **levers),
        )
        for f in FAMILIES
    }
    check((pool2 if kind == "tp=2" else pool4).run(errors, runs))


def rows_of_ranks() -> list[tuple[int, ...]]:
    """Runs on each rank: the local shapes of what holds the experts."""
    mesh = build_mesh(resolve_sizes(2, tp=2), "cpu")
    model = parallelize(tiny_model("qwen3_moe"), mesh, FSDP2Config(tp_plan=plan("qwen3_moe")))
    experts = model.get_submodule("model.layers.0.mlp.experts")
    return [tuple(p.to_local().shape) for p in experts.parameters()]  # type: ignore[attr-defined]


def test_a_rank_holds_half_of_the_experts_whole(pool2: Pool) -> None:
    assert pool2.run(rows_of_ranks) == [[(2, 128, 96), (2, 96, 64)]] * 2


def with_rules(rules: dict[str, str], **changes: int) -> None:
    mesh = build_mesh(resolve_sizes(2, tp=2), "cpu")
    parallelize(tiny_model("qwen3_moe", **changes), mesh, FSDP2Config(tp_plan=rules))


@pytest.mark.parametrize(
    ("without", "changes", "message"),
    [
        ("down_proj", {}, r"gate_up_proj whole \(grouped_gemm\), but not those in .*down_proj"),
        ("", {"num_experts": 5}, r"tp=2 does not divide the 5 of"),
    ],
)
def test_what_is_refused(without: str, changes: dict[str, int], message: str, pool2: Pool) -> None:
    rules = {name: style for name, style in plan("qwen3_moe").items() if not without or not name.endswith(without)}
    with pytest.raises(RankFailed, match=message):
        pool2.run(with_rules, rules, **changes)
