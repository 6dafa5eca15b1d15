"""Blocks of a user that call ``torch.utils.checkpoint`` for parts of themselves: what is computed again is the same."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

from lightning_automodel.config import FSDP2Config
from lightning_automodel.testing.pool import Pool
from tests.support.comparison import Schedule, compare
from tests.support.families import tiny_model

BOUND = 1e-5


class Recomputed(LlamaMLP):
    """Draws inside, on a part of the features, and outside, on all."""

    options: dict[str, Any]

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.compute, x, **self.options)

    def compute(self, x: Tensor) -> Tensor:
        return functional.dropout(self.down_proj(self.inside(x)), 0.1, self.training)

    def inside(self, x: Tensor) -> Tensor:
        return functional.dropout(functional.silu(self.gate_proj(x)) * self.up_proj(x), 0.2, self.training)


class Nested(Recomputed):
    """Computes a part of a part again."""

    def compute(self, x: Tensor) -> Tensor:
        return functional.dropout(self.down_proj(checkpoint(self.inside, x, **self.options)), 0.1, self.training)


class WithoutParameters(Recomputed):
    """Computes again what has none."""

    def forward(self, x: Tensor) -> Tensor:
        drop = partial(functional.dropout, p=0.2, training=self.training)
        return self.down_proj(checkpoint(drop, self.gate_proj(x) * self.up_proj(x), **self.options))


class Layer(LlamaDecoderLayer):
    """Computes its attention again, with the norm before it."""

    def forward(self, hidden_states: Tensor, **others: Any) -> Tensor:
        attend = lambda x: self.self_attn(hidden_states=self.input_layernorm(x), **others)[0]  # noqa: E731
        x = hidden_states + checkpoint(attend, hidden_states, use_reentrant=False)
        return x + functional.dropout(self.mlp(self.post_attention_layernorm(x)), 0.1, self.training)


def with_feed_forwards(kind: type[Recomputed], **options: Any) -> nn.Module:
    model: Any = tiny_model("llama", attention_dropout=0.1)
    for layer in model.model.layers:
        layer.mlp.__class__, layer.mlp.options = kind, options
    return model


def with_layers() -> nn.Module:
    model: Any = tiny_model("llama", attention_dropout=0.1)
    for layer in model.model.layers:
        layer.__class__ = Layer
    return model


def saving_products() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])


CASES: dict[str, Callable[[], nn.Module]] = {
    "plain": partial(with_feed_forwards, Recomputed, use_reentrant=False),
    "reentrant": partial(with_feed_forwards, Recomputed, use_reentrant=True),
    "selective": partial(with_feed_forwards, Recomputed, use_reentrant=False, context_fn=saving_products),
    "nested": partial(with_feed_forwards, Nested, use_reentrant=False),
    "draws alone": partial(with_feed_forwards, WithoutParameters, use_reentrant=False),
    "attention": with_layers,
}


def errors(config: FSDP2Config) -> dict[str, tuple[float, str]]:
    """Runs on each rank."""
    schedule = Schedule(steps=2)
    return {name: compare(make, {"tp": 2}, 2, schedule, config).largest for name, make in CASES.items()}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_it_has_the_numbers_of_one_process(sequence_parallel: bool, pool2: Pool) -> None:
    for found in pool2.run(errors, FSDP2Config(sequence_parallel=sequence_parallel)):
        assert {name: error for name, error in found.items() if error[0] > BOUND} == {}
