"""Families through the planner, on a CUDA device that is not there: none mixes devices."""

import pytest

from lightning_automodel import FSDP2Config
from lightning_automodel.mesh import resolve_sizes
from lightning_automodel.planner.plan import build
from lightning_automodel.planner.play import Run, play, stage
from tests.support.families import causal_families, tiny_config

FEW = ("gemma2", "qwen3_next", "olmoe", "dbrx")
"""Norms that cast back by ``type_as``, linear attention, experts that are counted by a histogram, or by a mask."""


STOPS = {
    "hrm_text": "its backward pass asks torch for the accelerator of this machine",
    "minimax": "it multiplies float32 by bfloat16 in this precision",
}


def check(family: str) -> None:
    config = FSDP2Config(sequence_parallel=True)
    run = Run(sizes=resolve_sizes(8, tp=2), config=config, sequence_length=24, micro_batch=2)
    model = build(tiny_config(family))
    with stage(run) as mesh:
        watched = play(model, run, mesh)
    assert watched.flops["backward"] > 0
    assert watched.peaks["backward"]["activations"] >= 0
    assert any(key.axis == "tp" for key in watched.volume)


@pytest.mark.parametrize("family", FEW)
def test_few_families(family: str) -> None:
    check(family)


@pytest.mark.long
@pytest.mark.parametrize("family", [family for family in causal_families() if family not in STOPS])
def test_every_family_with_a_plan(family: str) -> None:
    check(family)


@pytest.mark.long
@pytest.mark.parametrize("family", STOPS)
def test_families_that_stop(family: str) -> None:
    with pytest.raises(RuntimeError):
        check(family)
