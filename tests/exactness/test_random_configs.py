"""Random small configs of four families: tp=2 equals one process."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from lightning_automodel.testing.pool import Pool
from tests.support.comparison import Schedule, compare

BOUND = 1e-4
FAMILIES: dict[str, type[PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "qwen3": Qwen3Config,
    "gemma3": Gemma3TextConfig,
    "mixtral": MixtralConfig,
}


@st.composite
def configs(draw: Callable) -> dict[str, Any]:
    """Fields of a config: tp=2 divides the heads, and nothing else has to fit."""
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    heads = max(2, kv_heads) * draw(st.integers(1, 2))
    fields = {
        "num_key_value_heads": kv_heads,
        "num_attention_heads": heads,
        "head_dim": draw(st.sampled_from([4, 8, 10])),
        "hidden_size": heads * draw(st.integers(3, 7)),  # the configs want a multiple
        "intermediate_size": draw(st.integers(15, 30)),
        "vocab_size": draw(st.integers(50, 70)),
        "num_hidden_layers": draw(st.integers(1, 2)),
        "tie_word_embeddings": draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
        "mlp_bias": draw(st.booleans()),
        "num_local_experts": 4,
        "sliding_window": 4,
        "pad_token_id": draw(st.sampled_from([None, 0, 49])),
    }
    return fields


def build(family: str, fields: dict[str, Any]) -> nn.Module:
    """A model whose vectors are not at their trivial initial values."""
    config_class = FAMILIES[family]
    known = {field.name for field in dataclasses.fields(config_class)}
    if family == "mixtral":  # gate and up are one matrix: tp has to divide each of the two, or the model is refused
        fields = {**fields, "intermediate_size": fields["intermediate_size"] // 2 * 2}
    config = config_class(**{k: v for k, v in fields.items() if k in known}, use_cache=False)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def draw_batches(vocabulary: int, schedule: Schedule, step: int, data_rank: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    ids = [torch.randint(vocabulary, (2, 9), generator=generator) for _ in range(schedule.micro_batches)]
    return [{"input_ids": x, "labels": x} for x in ids]


def error(family: str, fields: dict[str, Any]) -> tuple[float, str]:
    """Runs on each rank."""
    draw = partial(draw_batches, fields["vocab_size"])
    schedule = Schedule(steps=1, micro_batches=2, clip=None)
    return compare(partial(build, family, fields), {"tp": 2}, 2, schedule, draw=draw).largest


@pytest.mark.slow
@settings(
    max_examples=12,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(family=st.sampled_from(sorted(FAMILIES)), fields=configs())
def test_tp_equals_one_process(pool2: Pool, family: str, fields: dict[str, Any]) -> None:
    for largest, name in pool2.run(error, family, fields):
        assert largest <= BOUND, (name, largest)
