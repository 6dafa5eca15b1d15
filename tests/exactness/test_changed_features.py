"""Models of transformers in which somebody computes across the features or heads that tensor parallelism splits."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

from lightning_automodel.config import FSDP2Config
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.plans.known_code import is_known, works_across_features
from lightning_automodel.testing.pool import Pool
from tests.support.comparison import Schedule, batches, compare
from tests.support.families import tiny_model
from tests.support.marks import with_long

BOUND = 1e-5
SCHEDULE = Schedule(steps=2)
Mix = Callable[[Tensor], Tensor]


class Gated(LlamaMLP):
    """Its hidden features pass ``mix``, which tests assign."""

    mix: Mix

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.mix(self.up_proj(x)))


class BiasedGated(Gated):
    """Writes the residual stream, so that its members take collectives of their own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.bias


def largest(x: Tensor) -> Tensor:
    return x / (1 + x.abs().max(-1, keepdim=True)[0])


def rolled(x: Tensor) -> Tensor:
    return x.roll(1, -1)


def numbered(x: Tensor) -> Tensor:
    return x * torch.arange(x.shape[-1]) / 9


def counted(x: Tensor) -> Tensor:
    return x / x.shape[-1] ** 0.5


def grouped(x: Tensor) -> Tensor:
    return x.unflatten(-1, (8, -1)).softmax(-2).flatten(-2)


def in_eights(x: Tensor) -> Tensor:
    """Returns what is right on slices: eight features that stand together are on one rank."""
    return x.unflatten(-1, (-1, 8)).softmax(-1).flatten(-2)


class Clamped(torch.autograd.Function):
    """Changes gradients alone, each by itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.clamp(-1e-3, 1e-3)


class ClampingWhatEnters(LlamaMLP):
    """Changes a gradient of which a rank has a term."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Clamped.apply(x))


class ClampingInside(LlamaMLP):
    """Changes gradients of a rank's features."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * Clamped.apply(self.up_proj(x)))


class Thresholded(LlamaMLP):
    """Compares with all features, and only while it trains."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        if self.training:
            hidden = hidden * (hidden.abs() > 0.3 * hidden.detach().abs().amax((0, 1, 2)))
        return self.down_proj(hidden)


class Counting(LlamaMLP):
    """Keeps a running mean of a part of its features."""

    mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        if self.training:
            self.mean.lerp_(hidden.detach().abs().flatten().sort()[0].mean(), 0.1)
        return self.down_proj(hidden)


class Scored(LlamaMLP):
    """Keeps what it computes, by which losses may be."""

    def forward(self, x: Tensor) -> Tensor:
        score = torch.sigmoid(self.score(x))
        self.kept, self.listed[:] = score.square().mean(), [score.mean()]
        self.calls += 1
        return super().forward(x) * score


class ReadingScores(LlamaForCausalLM):
    """Adds them to its loss."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        for mlp in feed_forwards(self):
            output.loss = output.loss + mlp.kept + mlp.listed[0]
        return output


def mixing_heads(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **others: Any) -> Any:
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    weights = (query @ key.transpose(-1, -2) * module.scaling + (0 if mask is None else mask)).softmax(-1)
    weights = weights - 0.5 * weights.mean(1, keepdim=True)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def feed_forwards(model: Any) -> list[Any]:
    return [layer.mlp for layer in model.model.layers]


def with_class(kind: type[Gated], mix: Mix) -> nn.Module:
    model: Any = tiny_model("llama")
    for mlp in feed_forwards(model):
        mlp.__class__, mlp.mix = kind, mix
        if kind is BiasedGated:
            mlp.bias = nn.Parameter(torch.full((model.config.hidden_size,), 0.1))
    return model


def with_code(code: Callable, of: str = "") -> nn.Module:
    """Assigns ``code`` to the ``forward`` of feed-forwards, or of what they hold."""
    model: Any = tiny_model("llama")
    for mlp in feed_forwards(model):
        part = mlp.get_submodule(of)
        part.forward = MethodType(code, part)
    return model


def with_activation(make: Callable[[], nn.Module]) -> nn.Module:
    model: Any = tiny_model("llama")
    for mlp in feed_forwards(model):
        mlp.act_fn = make()
    return model


def with_function() -> nn.Module:
    model: Any = tiny_model("llama")
    for mlp in feed_forwards(model):
        del mlp.act_fn
        mlp.act_fn = grouped
    return model


def with_attention() -> nn.Module:
    AttentionInterface.register("mixes_heads", mixing_heads)
    model: Any = tiny_model("llama")
    model.config._attn_implementation = "mixes_heads"
    return model


def with_residual(self: Any, x: Tensor) -> Tensor:
    return x + self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def with_unit_columns(self: Any, x: Tensor) -> Tensor:
    return functional.linear(x, functional.normalize(self.weight, dim=0))


class Reading(LlamaDecoderLayer):
    """Computes with a weight of what it holds."""

    def forward(self, hidden_states: Tensor, **others: Any) -> Tensor:
        return super().forward(hidden_states, **others) * (1 + self.mlp.up_proj.weight.mean())


def with_blocks() -> nn.Module:
    model: Any = tiny_model("llama")
    for layer in model.model.layers:
        layer.__class__ = Reading
    return model


def with_kind(kind: type[nn.Module]) -> nn.Module:
    model: Any = tiny_model("llama")
    for mlp in feed_forwards(model):
        mlp.__class__ = kind
        if kind is Counting:
            mlp.register_buffer("mean", torch.zeros(()))
    return model


def with_scores(reads: bool) -> nn.Module:
    model: Any = tiny_model("llama")
    model.__class__ = ReadingScores if reads else type(model)
    torch.manual_seed(1)
    for mlp in feed_forwards(model):
        mlp.__class__, mlp.score, mlp.listed, mlp.calls = (
            Scored,
            nn.Linear(model.config.hidden_size, 1, bias=False),
            [],
            0,
        )
    return model


REFUSED: dict[str, Callable[[], nn.Module]] = {
    **{mix.__name__: partial(with_class, Gated, mix) for mix in (largest, rolled, numbered, counted, grouped)},
    "members": partial(with_class, BiasedGated, rolled),
    "residual": partial(with_code, with_residual),
    "columns": partial(with_code, with_unit_columns, "up_proj"),
    "softmax": partial(with_activation, partial(nn.Softmax, -1)),
    "function": with_function,
    "attention": with_attention,
    "blocks": with_blocks,
    "in training": partial(with_kind, Thresholded),
    "buffers": partial(with_kind, Counting),
    "gradients": partial(with_kind, ClampingWhatEnters),
}
EXACT: dict[str, Callable[[], nn.Module]] = {
    "in_eights": partial(with_class, Gated, in_eights),
    "members": partial(with_class, BiasedGated, in_eights),
    "one": partial(with_activation, nn.PReLU),
    "kept": partial(with_scores, reads=False),
    "gradients": partial(with_kind, ClampingInside),
}


def messages(config: FSDP2Config) -> dict[str, str]:
    """Runs on each rank: what the first forward pass says."""
    mesh, found = build_mesh(resolve_sizes(2, tp=2), "cpu"), {}
    for name, make in REFUSED.items():
        try:
            parallelize(make(), mesh, config).train()(**batches(SCHEDULE, 0, 0)[0])
            found[name] = ""
        except ValueError as error:
            found[name] = str(error)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", with_long([False, True], False))
def test_what_a_part_of_the_features_does_not_tell_is_refused(sequence_parallel: bool, pool2: Pool) -> None:
    for found in pool2.run(messages, FSDP2Config(sequence_parallel=sequence_parallel)):
        silent = {name for name, message in found.items() if "model.layers." not in message}
        silent -= {"blocks"} if sequence_parallel else set()  # their children are on slices of the sequence
        assert silent == set()
        assert "gives other numbers with parts of its weights on the tp ranks than with the whole" in found["largest"]
        assert "a rule 'replicate' for each of its layers (model.layers.*.mlp.gate_proj, " in found["largest"]


def errors() -> dict[str, tuple[float, str]]:
    """Runs on each rank."""
    return {name: compare(make, {"tp": 2}, 2, SCHEDULE).largest for name, make in EXACT.items()}


@pytest.mark.slow
def test_what_is_right_on_parts_is_exact(pool2: Pool) -> None:
    for found in pool2.run(errors):
        assert {name: error for name, error in found.items() if error[0] > BOUND} == {}


SEPARATE = {"extends": "model", "model.layers.*.mlp": "separate"}


def read_scores() -> tuple[str, float, list[int]]:
    """Runs on each rank: what is said of a loss of what is kept, the error by the way out, and how often layers ran."""
    read = partial(with_scores, reads=True)
    with pytest.raises(ValueError, match="a loss reads what") as caught:
        compare(read, {"tp": 2}, 2, SCHEDULE)
    error = compare(read, {"tp": 2}, 2, SCHEDULE, FSDP2Config(tp_plan=SEPARATE)).largest[0]
    model: Any = parallelize(with_scores(reads=False), build_mesh(resolve_sizes(2, tp=2), "cpu")).train()
    model(**batches(SCHEDULE, 0, 0)[0])
    return str(caught.value), error, [mlp.calls for mlp in feed_forwards(model)]


def test_a_loss_of_what_a_module_keeps_is_refused(pool2: Pool) -> None:
    for said, error, calls in pool2.run(read_scores):
        assert "model.layers.1.mlp (Scored) keeps in its attribute" in said
        assert "'model.layers.*.mlp': 'separate'" in said
        assert error < BOUND
        assert calls == [1, 1]  # no trace of the trial


def with_masks(schedule: Schedule, step: int, data_rank: int) -> list[dict[str, Tensor]]:
    """Batches with a mask for each of the heads of the model, causal and with slopes, as ALiBi has."""
    causal = torch.full((schedule.length, schedule.length), float("-inf")).triu(1)
    slopes = torch.linspace(-0.5, 0.5, 4).view(1, 4, 1, 1) * torch.arange(schedule.length)
    mask = (causal + slopes).expand(schedule.rows, -1, -1, -1)
    return [{**batch, "attention_mask": mask} for batch in batches(schedule, step, data_rank)]


def mask_heads(config: FSDP2Config) -> list[float]:
    """Runs on each rank."""
    makers = (partial(tiny_model, "llama"), partial(tiny_model, "gemma2"), partial(tiny_model, "gpt_neox"))
    found = [compare(make, {"tp": 2}, 2, SCHEDULE, config, draw=with_masks).largest[0] for make in makers]
    whole = {f"model.layers.*.self_attn.{name}_proj": "replicate" for name in "qkvo"}
    config = replace(config, tp_plan={"extends": "model", **whole})
    found.append(compare(makers[0], {"tp": 2}, 2, SCHEDULE, config, draw=with_masks).largest[0])
    model = parallelize(makers[0](), build_mesh(resolve_sizes(2, tp=2), "cpu"))
    (batch, *_) = with_masks(SCHEDULE, 0, 0)
    by_place = model(batch["input_ids"], batch["attention_mask"], labels=batch["labels"]).loss
    assert torch.equal(by_place, model(**batch).loss)
    with pytest.raises(ValueError, match="attention_mask has a gradient for each of 4 heads"):
        model(**{**batch, "attention_mask": batch["attention_mask"].clone().requires_grad_()})
    return found


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", with_long([False, True], False))
def test_masks_of_each_head_are_cut(sequence_parallel: bool, pool2: Pool) -> None:
    for found in pool2.run(mask_heads, FSDP2Config(sequence_parallel=sequence_parallel)):
        assert max(found) < BOUND


def test_which_code_is_known() -> None:
    plain: Any = tiny_model("llama")
    assert all(map(is_known, plain.modules()))
    assert not is_known(with_code(with_residual).model.layers[0].mlp)  # type: ignore[union-attr, index]
    assert not is_known(with_function().model.layers[0].mlp)  # type: ignore[union-attr, index]
    assert not is_known(with_attention().model.layers[0].self_attn)  # type: ignore[union-attr, index]
    across = [nn.Softmax(-1), nn.GLU(), nn.PReLU(8), nn.LayerNorm(8, elementwise_affine=False), nn.AvgPool1d(2)]
    assert all(map(works_across_features, across))
    assert not any(map(works_across_features, [nn.Linear(2, 2), nn.SiLU(), nn.PReLU(), nn.Dropout(), nn.Sequential()]))
