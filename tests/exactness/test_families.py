"""A dozen families, one of each kind, against one process; `python -m benchmarks.exactness` compares all of them."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from lightning_automodel.testing.pool import Pool
from tests.support.comparison import Schedule
from tests.support.families import image_text_families, tiny_model
from tests.support.images import find_inputs
from tests.support.marks import with_long, with_slow
from tests.support.run_family import Run, differences

BOUND = 1e-4
ONE_STEP = Schedule(steps=1, clip=None)
MESH = {"dp_shard": 2, "tp": 2}
HYBRID = {"num_hidden_layers": 4}  # one of each kind of layer
ROUTER = {"output_router_logits": True, "router_aux_loss_coef": 1.0}

KINDS = {
    "dense": ["llama", "qwen2", "qwen3", "gemma3_text"],  # grouped-query attention, biases, q/k norms, ties
    "fused": ["phi3", "deepseek_v3", "gpt_oss"],  # packed projections, latent attention and experts, sinks
    "experts": ["mixtral", "qwen3_moe"],
    "recurrent": ["qwen3_5_text", "nemotron_h"],
    "images": ["qwen2_5_vl"],
    "written": ["gemma3n_text"],  # clamps a weight in place, in every forward pass
}
CHANGES = dict.fromkeys(KINDS["recurrent"], HYBRID) | dict.fromkeys(KINDS["experts"], ROUTER)


FROM_FILES = ("fused", "images")
"""Kinds of which both sides read their weights from files; the others begin with a model in memory."""


def errors(runs: dict[str, Run], directory: Path | None = None, double: bool = False) -> dict[str, tuple[float, str]]:
    """Runs on each rank: the largest error of each family, computed in float64 if ``double``."""
    found = {}
    for family, run in runs.items():
        inputs = find_inputs(tiny_model(family).train()) if family in image_text_families() else None
        place = directory / family if directory else None
        found[family] = differences(family, run, inputs, double, place).largest
    return found


def check(results: Iterable[dict[str, tuple[float, str]]]) -> None:
    for result in results:
        assert {family: error for family, error in result.items() if error[0] > BOUND} == {}


@pytest.mark.parametrize("kind", with_slow(with_long(KINDS, "dense", "images"), "fused", "recurrent"))
def test_three_clipped_steps_of_two_micro_batches_on_a_mesh(kind: str, pool4: Pool) -> None:
    runs = {f: Run(sizes=MESH, schedule=Schedule(), changes=CHANGES.get(f, {})) for f in KINDS[kind]}
    # Recurrent mixers amplify rounding: in float32 the last digits of some processors are more than the bound.
    check(pool4.run(errors, runs, double=kind == "recurrent", with_directory=kind in FROM_FILES))


@pytest.mark.slow
def test_more_ranks_than_key_value_heads(pool4: Pool) -> None:
    runs = {
        f: Run(sizes={"tp": 4}, schedule=ONE_STEP) for f in ("llama", "qwen3", "gemma3_text", "mixtral", "starcoder2")
    }
    check(pool4.run(errors, runs))


SPLIT_BY_STRUCTURE = (
    "diffusion_gemma",  # an encoder tied to a decoder, of which the plan names one
    "ernie4_5_vl_moe",  # router logits are recorded from a boundary that also returns the hidden states
    "glm5_next",  # row style in layers that compute with whole matrices
    "inkling2",  # what the plan of the language model lacks, inside of a composite model
    "t5gemma2",  # an embedding with a second parameter, for one token
)


@pytest.mark.slow
def test_what_plans_do_not_say_is_found_in_the_structure(pool2: Pool) -> None:
    check(pool2.run(errors, {f: Run(sizes={"tp": 2}, schedule=ONE_STEP) for f in SPLIT_BY_STRUCTURE}))


SHARING = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
"""The last two layers attend with the keys and values of the first two."""


def test_layers_that_share_keys_and_values(pool2: Pool) -> None:
    runs = {
        f: Run(sizes={"tp": 2}, schedule=Schedule(steps=1), changes=SHARING) for f in ("gemma4_text", "gemma3n_text")
    }
    check(pool2.run(errors, runs))


GATHERED_BY_THE_ROOT = (
    "mllama",  # text alone skips blocks, on one data rank only
    "reformer",  # blocks run again in the backward pass, without their hooks
    "zamba",  # blocks share parameters
)


@pytest.mark.slow
def test_blocks_that_cannot_be_gathered_alone(pool2: Pool) -> None:
    check(pool2.run(errors, {f: Run(sizes={"dp_shard": 2}, schedule=ONE_STEP) for f in GATHERED_BY_THE_ROOT}))


def error_in_float64(family: str, run: Run) -> tuple[float, str]:
    """Runs on each rank."""
    return differences(family, run, find_inputs(tiny_model(family).train()), double=True).largest


@pytest.mark.slow
@pytest.mark.parametrize("family", with_long(["qwen3_5", "qwen3_5_moe"], "qwen3_5"))
def test_composite_models_of_mixed_layers_in_float64(family: str, pool4: Pool) -> None:
    """Their recurrent layers amplify rounding in float32."""
    for error, name in pool4.run(error_in_float64, family, Run(sizes=MESH, schedule=Schedule(steps=2))):
        assert error < 1e-9, name
