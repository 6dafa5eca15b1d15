"""What peft adds to models of several kinds: every gradient of every factor is that of one process."""

from functools import partial
from typing import Any

import pytest
from torch import nn

from lightning_automodel.config import FSDP2Config
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.plans import derive_layout, select_plan
from lightning_automodel.testing.pool import Pool
from tests.plans.support import build_opt
from tests.support.adapted import adapted, adapter_error, with_adapter
from tests.support.comparison import Schedule, compare

BOUND = 1e-5
SCHEDULE = Schedule(steps=3, length=12)
QUICK = [
    *(("llama", method) for method in ("bias", "ends", "saved", "table")),
    ("mixtral", "experts"),
    ("phi3", "dora"),
]
MORE = [
    *(("llama", method) for method in ("all-linear", "rslora", "saved mlp", "ia3")),
    *((family, "experts") for family in ("qwen3_moe", "gpt_oss", "deepseek_v3")),
    *((family, "all-linear") for family in ("qwen3", "gemma3_text", "gpt_neox", "qwen2_5_vl")),
]
LAYOUTS = {"tp": ({"tp": 2}, True), "dp-tp": ({"dp_shard": 2, "tp": 2}, False), "dp": ({"dp_shard": 2}, False)}
_LAYER = "model.decoder.layers.*"
SPLIT = {
    **{f"{_LAYER}.self_attn.{name}_proj": "colwise" for name in "qkv"},
    **{f"{_LAYER}.self_attn.out_proj": "rowwise", f"{_LAYER}.fc1": "colwise", f"{_LAYER}.fc2": "rowwise"},
}
"""A plan of a user's, whose feed-forward has no module of its own: the block holds what gives features of a rank."""
SEPARATE = SPLIT | {f"{_LAYER}.self_attn": "separate"}


def errors(cases: list[tuple[str, str]], layout: str) -> list[tuple[float, str]]:
    """Runs on each rank."""
    sizes, sequence_parallel = LAYOUTS[layout]
    config = FSDP2Config(sequence_parallel=sequence_parallel)
    return [adapter_error(family, method, sizes, SCHEDULE, config) for family, method in cases]


def check(pool: Pool, cases: list[tuple[str, str]], layout: str) -> None:
    for found in pool.run(partial(errors, cases, layout)):
        for case, largest in zip(cases, found, strict=True):
            assert largest[0] <= (2 if case[1] == "bias" else 1) * BOUND, (case, largest)


@pytest.mark.slow
def test_factors_are_exact(pool2: Pool) -> None:
    check(pool2, QUICK, "tp")


def errors_of_own_plans() -> dict[str, tuple[float, str]]:
    """Runs on each rank."""

    def error(method: str, plan: dict[str, str]) -> tuple[float, str]:
        def make_parallel(model: Any, mesh: Any) -> nn.Module:
            parallelize(model.get_base_model(), mesh, FSDP2Config(tp_plan=plan))
            return model

        build = lambda: with_adapter(build_opt(), method)  # noqa: E731
        return compare(build, {"tp": 2}, 2, SCHEDULE, make_parallel=make_parallel).largest

    plans = {"all-linear": SPLIT, "dora": SPLIT, "dora, separate": SEPARATE}
    return {method: error(method.partition(",")[0], plan) for method, plan in plans.items()}


@pytest.mark.slow
def test_plans_of_users_split_adapted_layers_too(pool2: Pool) -> None:
    for found in pool2.run(errors_of_own_plans):
        for method, largest in found.items():
            assert largest[0] <= BOUND, (method, largest)


@pytest.mark.long
@pytest.mark.parametrize("case", [*QUICK, *MORE], ids="-".join)
def test_factors_on_four_ranks_are_exact(case: tuple[str, str], pool4: Pool) -> None:
    check(pool4, [case], "dp-tp")


@pytest.mark.long
@pytest.mark.parametrize("layout", ["tp", "dp"])
@pytest.mark.parametrize("case", [*QUICK, *MORE], ids="-".join)
def test_factors_on_two_ranks_are_exact(case: tuple[str, str], layout: str, pool2: Pool) -> None:
    check(pool2, [case], layout)


def test_what_is_not_known_to_be_split_is_refused() -> None:
    model = adapted("llama", "tokens").get_base_model()
    with pytest.raises(ValueError, match=r"trainable_tokens_delta of model\.embed_tokens\.token_adapter") as refusal:
        derive_layout(model, select_plan(model), 2)
    assert "tensor parallelism splits model.embed_tokens.weight" in str(refusal.value)
    assert "use tp=1 with dp_shard" in str(refusal.value)
