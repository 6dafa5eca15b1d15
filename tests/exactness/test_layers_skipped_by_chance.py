"""Decoders that skip layers at random (``layerdrop``) on a cut sequence: the first or the last one, too, or all."""

import pytest
import torch
import torch.distributed as dist
from transformers import OPTConfig, OPTForCausalLM, PreTrainedModel, XGLMConfig, XGLMForCausalLM

from lightning_automodel.config import FSDP2Config
from lightning_automodel.testing.pool import Pool
from tests.support.comparison import Schedule, compare

BOUND = 1e-4
SCHEDULE = Schedule(steps=4, learning_rate=0.02)
RATES = {"layerdrop": 0.5, "dropout": 0.1, "attention_dropout": 0.1}
SIZES = {"vocab_size": 128, "max_position_embeddings": 32}
OPT = OPTConfig(**SIZES, **RATES, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4)
XGLM = XGLMConfig(**SIZES, **RATES, d_model=32, ffn_dim=64, num_layers=2, attention_heads=4, pad_token_id=1)


def build(kind: type[PreTrainedModel]) -> PreTrainedModel:
    """Draw a model of ``kind`` of which no vector is zero."""
    torch.manual_seed(0)
    model = kind(OPT if kind is OPTForCausalLM else XGLM)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def error(kind: type[PreTrainedModel], checkpointing: bool) -> tuple[float, str]:
    """Runs on each rank."""
    config = FSDP2Config(sequence_parallel=True, activation_checkpointing=checkpointing)
    return compare(lambda: build(kind), {"tp": 2}, dist.get_world_size(), SCHEDULE, config).largest


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("kind", [OPTForCausalLM, XGLMForCausalLM], ids=lambda kind: kind.__name__)
def test_any_layer_may_be_the_first_or_the_last(kind: type[PreTrainedModel], checkpointing: bool, pool2: Pool) -> None:
    for largest, name in pool2.run(error, kind, checkpointing):
        assert largest <= BOUND, name
