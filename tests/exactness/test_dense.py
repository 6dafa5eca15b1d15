"""Llama and Qwen3, tied and untied, on every layout of two and four ranks."""

from functools import partial
from itertools import product

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.testing.pool import Pool
from tests.support.comparison import Schedule, compare
from tests.support.marks import with_long

BOUND = 1e-5
SIZES = dict(
    hidden_size=96,  # differs from heads x head_dim, so that a mix-up of the two shows
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=131,  # not divisible by tp
    use_cache=False,
)
LAYOUTS = {
    2: [{"tp": 2}, {"dp_shard": 2}, {"dp_replicate": 2}],
    4: [{"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2}],
}


def build(family: str, tied: bool) -> nn.Module:
    """A tiny model whose vectors are not at their trivial initial values."""
    config_class = {"llama": LlamaConfig, "qwen3": Qwen3Config}[family]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_class(**SIZES, tie_word_embeddings=tied, attention_bias=True))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def errors(family: str, tied: bool, world: int) -> dict[str, tuple[float, str]]:
    """Runs on each rank: the largest error of each layout."""
    found = {}
    for sizes in LAYOUTS[world]:
        differences = compare(partial(build, family, tied), sizes, world, Schedule())
        found[str(sizes)] = differences.largest
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "family", "tied"),
    with_long(
        product([2, 4], ["llama", "qwen3"], [True, False]),
        (2, "llama", False),
        (4, "llama", False),
        (4, "llama", True),
        (4, "qwen3", False),
        (4, "qwen3", True),
    ),
)
def test_layout_equals_one_process(family: str, tied: bool, world: int, pool2: Pool, pool4: Pool) -> None:
    pool = {2: pool2, 4: pool4}[world]
    for result in pool.run(errors, family, tied, world):
        assert {layout: error for layout, error in result.items() if error[0] > BOUND} == {}


def refusals() -> list[str]:
    """Runs on each rank: what a split embedding says to ids outside of the vocabulary."""
    model = parallelize(build("llama", tied=True), build_mesh(resolve_sizes(2, tp=2), "cpu"))
    said = []
    for bad in (SIZES["vocab_size"], -1):
        try:
            model(torch.tensor([[3, bad, 5]]))
        except IndexError as error:
            said.append(str(error))
    return said


def test_ids_outside_of_the_vocabulary_are_refused_as_on_one_process(pool2: Pool) -> None:
    with pytest.raises(IndexError) as expected:
        build("llama", tied=True)(torch.tensor([[3, SIZES["vocab_size"], 5]]))
    assert pool2.run(refusals) == [[str(expected.value)] * 2] * 2
