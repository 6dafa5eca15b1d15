"""Blocks of a user that call ``torch.utils.checkpoint`` for parts of themselves: what is computed again is the same."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP, LlamaModel

from lightning_automodel.config import FSDP2Config
from lightning_automodel.distributed.random_numbers import RandomNumbers
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallel.draws.passes import draw_from
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.testing.pool import Pool
from tests.support.comparison import Schedule, batches, compare
from tests.support.families import tiny_model
from tests.support.marks import with_long
from tests.support.training import whole

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


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", with_long([False, True], False))
def test_it_has_the_numbers_of_one_process(sequence_parallel: bool, pool2: Pool) -> None:
    for found in pool2.run(errors, FSDP2Config(sequence_parallel=sequence_parallel)):
        assert {name: error for name, error in found.items() if error[0] > BOUND} == {}


# ---- layers that the model around them computes again ----------------------------------------------------------------


class Model(LlamaModel):
    """Calls ``checkpoint`` for each of its layers, or for all of them at once."""

    options: dict[str, Any]
    at_once: bool

    def forward(self, input_ids: Tensor, **others: Any) -> BaseModelOutputWithPast:
        x, positions = self.embed_tokens(input_ids), torch.arange(input_ids.shape[1])[None]
        tables = self.rotary_emb(x, positions)

        def run(x: Tensor, layers: Iterable[nn.Module]) -> Tensor:
            for layer in layers:
                x = layer(x, position_ids=positions, position_embeddings=tables)
            return x

        for layers in [self.layers] if self.at_once else [[layer] for layer in self.layers]:
            x = checkpoint(run, x, layers, **self.options) if self.options else run(x, layers)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x))


def around_layers(options: dict[str, Any], dropout: float = 0.0, at_once: bool = False) -> nn.Module:
    model: Any = tiny_model("llama", attention_dropout=dropout)
    model.model.__class__ = Model
    model.model.options, model.model.at_once = options, at_once
    return model


FORMS: dict[str, dict[str, Any]] = {"plain": {"use_reentrant": False}, "reentrant": {"use_reentrant": True}}


def errors_around_layers(sizes: dict[str, int]) -> dict[str, float]:
    """Runs on each rank."""
    schedule = Schedule(steps=2)
    forms = [(form, at_once) for form in FORMS for at_once in (False, True)]
    made = {f"{form}, {at_once}": partial(around_layers, FORMS[form], 0.0, at_once) for form, at_once in forms}
    return {name: compare(make, sizes, 2, schedule).largest[0] for name, make in made.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    with_long([{"cp": 2}, {"tp": 2}, {"dp_shard": 2}], {"cp": 2}, {"dp_shard": 2}),
    ids=["cp2", "tp2", "dp2"],
)
def test_layers_of_a_model_that_computes_them_again(sizes: dict[str, int], pool2: Pool) -> None:
    for found in pool2.run(errors_around_layers, sizes):
        assert {name: error for name, error in found.items() if error > BOUND} == {}


def gradients_with_dropout() -> list[dict[str, Tensor]]:
    """Runs on each rank: without and with recomputation, of one pass with the same numbers, over cp."""
    found = []
    for options in ({}, *FORMS.values()):
        model = parallelize(around_layers(options, 0.3), build_mesh(resolve_sizes(2, cp=2), "cpu")).train()
        draw_from(model, RandomNumbers(seed=0))
        model(**batches(Schedule(), 0, 0)[0]).loss.backward()
        found.append({name: whole(p.grad) for name, p in model.named_parameters()})
    return found


def test_layers_over_cp_that_are_computed_again_draw_the_same(pool2: Pool) -> None:
    for plain, *others in pool2.run(gradients_with_dropout):
        for other in others:
            torch.testing.assert_close(other, plain, rtol=BOUND, atol=1e-7)
