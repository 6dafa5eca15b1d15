"""Layers that a user derived from torch.nn.Linear, in a model whose own plan splits them."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune
from transformers import LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from lightning_automodel.plans.derivation import derive_layout
from lightning_automodel.plans.selection import select_plan
from tests.plans.support import build_gpt2
from tests.support.training import tiny_llama


class MeanOfWeight(nn.Linear):
    """As of one bit: a sign and one scale for all of it."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight.sign() * self.weight.abs().mean(), self.bias)


class LargestOfInput(nn.Linear):
    """Rounds what enters by the largest of all features."""

    def forward(self, x: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True) / 7
        return functional.linear((x / scale).round() * scale, self.weight, self.bias)


class Factors(nn.Linear):
    """Adds a product to its weight."""

    def __init__(self, *arguments: Any, **others: Any) -> None:
        super().__init__(*arguments, **others)
        self.a, self.b = nn.Parameter(torch.zeros(2, self.in_features)), nn.Parameter(torch.zeros(self.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight + self.b @ self.a, self.bias)


class Scaled(nn.Linear):
    """Is right on parts."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * functional.linear(x, self.weight.tanh(), self.bias)


def reparametrized(function: Any) -> Any:
    """A layer whose weight is an attribute that a hook computes."""
    return lambda *sizes: function(nn.Linear(*sizes, bias=False))


def model_with(kind: Any, projection: str) -> LlamaForCausalLM:
    model = tiny_llama()
    mlp = model.model.layers[1].mlp
    plain = getattr(mlp, projection)
    layer = plain if kind is None else kind(plain.in_features, plain.out_features)
    setattr(mlp, projection, parametrizations.weight_norm(layer) if kind is None else layer)
    return model


@pytest.mark.parametrize(
    ("kind", "projection", "message"),
    [
        (MeanOfWeight, "up_proj", "gives other numbers with a part of the weight"),
        (MeanOfWeight, "down_proj", "gives other numbers with a part of the weight"),
        (LargestOfInput, "down_proj", "gives other numbers with a part of the weight"),
        (Factors, "up_proj", r"parameters beside weight and bias \(a, b\)"),
        (None, "up_proj", "remove_parametrizations"),
        (reparametrized(nn.utils.weight_norm), "up_proj", "by a hook .*remove_weight_norm"),
        (reparametrized(nn.utils.spectral_norm), "down_proj", "by a hook .*remove_spectral_norm"),
        (
            reparametrized(partial(prune.l1_unstructured, name="weight", amount=0.5)),
            "up_proj",
            r"by a hook .*prune\.remove",
        ),
    ],
)
def test_what_needs_the_whole_weight_is_refused(kind: Any, projection: str, message: str) -> None:
    model = model_with(kind, projection)
    with pytest.raises(ValueError, match=rf"layers\.\*\.mlp\.{projection}.*{message}"):
        derive_layout(model, select_plan(model), 2)


@pytest.mark.parametrize(
    ("kind", "projection"), [(Scaled, "up_proj"), (Scaled, "down_proj"), (LargestOfInput, "up_proj")]
)
def test_what_is_right_on_parts_is_split(kind: Any, projection: str) -> None:
    model = model_with(kind, projection)
    before = torch.get_rng_state()
    derive_layout(model, select_plan(model), 2)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("style", ["colwise_rep", "colwise_gather_output"])
def test_alone(style: str) -> None:
    model, name = model_with(MeanOfWeight, "up_proj"), "model.layers.*.mlp.up_proj"
    with pytest.raises(ValueError, match="gives other numbers with a part of the weight"):
        derive_layout(model, select_plan(model, {name: style}), 2)


class LessMeanOfRows(Conv1D):
    """[in, out]: takes a mean over its output features."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) - self.weight.mean(1).sum()


class LessMeanOfColumns(Conv1D):
    """Takes a mean over its input features."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) - (x.mean(-1, keepdim=True) * self.weight.std(0))


class Twice(Conv1D):
    """Is right on parts."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def turned_with(kind: type[Conv1D]) -> nn.Module:
    model: Any = build_gpt2()
    for block in model.transformer.h:
        block.mlp.c_fc.__class__ = block.mlp.c_proj.__class__ = kind
    return model


TURNED = [
    (LessMeanOfRows, "c_fc", "colwise_rep"),
    (LessMeanOfColumns, "c_proj", "rowwise_split_input"),
]


@pytest.mark.parametrize(("kind", "layer", "style"), TURNED)
def test_turned(kind: type[Conv1D], layer: str, style: str) -> None:
    plan, model = {f"transformer.h.*.mlp.{layer}": style}, turned_with(kind)
    with pytest.raises(ValueError, match=f"{layer}.*gives other numbers with a part of the weight"):
        derive_layout(model, select_plan(model, plan), 2)
    twice = turned_with(Twice)
    first: Any = twice.get_submodule(f"transformer.h.0.mlp.{layer}")
    width = first.nf
    derive_layout(twice, select_plan(twice, plan), 2)
    assert first.nf == width


class LessItsMean(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return functional.embedding(ids, self.weight - self.weight.mean(0))


class Indexed(nn.Embedding):
    """Reads rows that other ranks have."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[ids]


class Doubled(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return 2 * super().forward(ids)


class Probabilities(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight).log_softmax(-1)


def model_with_ends(table: type[nn.Embedding], head: type[nn.Linear]) -> LlamaForCausalLM:
    model = tiny_llama(tied=False)
    model.model.embed_tokens.__class__, model.lm_head.__class__ = table, head
    return model


@pytest.mark.parametrize(
    ("table", "head", "name"),
    [
        (LessItsMean, nn.Linear, "model.embed_tokens"),
        (Indexed, nn.Linear, "model.embed_tokens"),
        (nn.Embedding, Probabilities, "lm_head"),
        (nn.Embedding, MeanOfWeight, "lm_head"),
    ],
)
def test_ends_that_need_the_whole_table_are_refused(table: Any, head: Any, name: str) -> None:
    model = model_with_ends(table, head)
    with pytest.raises(ValueError, match=f"{name}.*gives other numbers with a part of the weight"):
        derive_layout(model, select_plan(model), 2)


def test_code_assigned_to_a_head_is_tried() -> None:
    model = tiny_llama(tied=False)
    inner = model.lm_head.forward
    model.lm_head.forward = lambda x: inner(x) * 2  # type: ignore[method-assign]
    derive_layout(model, select_plan(model), 2)
    model.lm_head.forward = lambda x: inner(x).softmax(-1)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"lm_head.*gives other numbers with a part of the weight"):
        derive_layout(model, select_plan(model), 2)


def test_ends_that_are_right_on_parts_are_split() -> None:
    model = model_with_ends(Doubled, Scaled)
    derive_layout(model, select_plan(model), 2)


def test_a_parametrized_embedding_is_refused() -> None:
    model = tiny_llama(tied=False)
    parametrizations.weight_norm(model.model.embed_tokens)
    with pytest.raises(ValueError, match=r"embed_tokens.*remove_parametrizations"):
        derive_layout(model, select_plan(model), 2)


class Tempered(nn.Module):
    """Is no linear layer, and has what it multiplies by."""

    def __init__(self, inside: nn.Linear) -> None:
        super().__init__()
        self.weight, self.temperature = inside.weight, nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight) * self.temperature


class Adapted(nn.Module):
    """A user's own LoRA."""

    def __init__(self, inside: nn.Linear) -> None:
        super().__init__()
        self.linear = inside
        self.a = nn.Parameter(torch.zeros(2, inside.in_features))
        self.b = nn.Parameter(torch.zeros(inside.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + x @ self.a.T @ self.b.T


@pytest.mark.parametrize(("kind", "named"), [(Tempered, "weight, temperature"), (Adapted, "a, b, linear.weight")])
def test_layers_with_parameters_of_several_sizes_are_refused(kind: Any, named: str) -> None:
    model: Any = tiny_llama(tied=False)
    model.lm_head = kind(model.lm_head)
    with pytest.raises(ValueError, match=rf"lm_head.*not cut alike \({named}\)"):
        derive_layout(model, select_plan(model), 2)
