"""LoRA under expert parallelism: frozen experts, and factors of stacked experts, against plain peft on one process."""

import pytest

from lightning_automodel.testing.pool import Pool
from tests.parallel.experts.test_exact import EIGHT, SCHEDULE, SIZES
from tests.support.adapted import adapter_error

BOUND = 1e-5


def errors(cases: list[tuple[str, str]], sizes: dict[str, int]) -> dict[str, tuple[float, str]]:
    """Runs on each rank: the largest error of each family and method."""
    return {f"{family}, {method}": adapter_error(family, method, sizes, SCHEDULE, **EIGHT) for family, method in cases}


@pytest.mark.slow
def test_factors_of_experts_over_every_axis(pool4: Pool) -> None:
    check([("gpt_oss", "experts"), ("llama4_text", "stacked")], "dp_shard=2 x tp=2 x ep=2", pool4)


@pytest.mark.long
@pytest.mark.parametrize("layout", ["dp_shard=4 x ep=2", "dp_shard=2 x tp=2 x ep=2"])
def test_factors_of_experts_and_frozen_experts(layout: str, pool4: Pool) -> None:
    check([("qwen3_moe", "experts"), ("gpt_oss", "experts"), ("qwen3_moe", "all-linear")], layout, pool4)


def check(cases: list[tuple[str, str]], layout: str, pool4: Pool) -> None:
    for result in pool4.run(errors, cases, SIZES[layout]):
        assert {case: error for case, error in result.items() if error[0] > BOUND} == {}
