"""Models of transformers that somebody changed: other modules in a place, layers among theirs, code of one's own."""

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_outputs import CausalLMOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, apply_rotary_pos_emb

from lightning_automodel.config import FSDP2Config
from lightning_automodel.plans.context import derive_context_layout
from lightning_automodel.plans.tokenwise import keeps_tokens_apart
from lightning_automodel.testing.pool import Pool
from tests.support.comparison import Schedule, compare
from tests.support.families import tiny_model

BOUND = 5e-5


class Shifted(nn.Module):
    """Sees the token before by torch's padding, as RWKV does."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.shift = inner, nn.ZeroPad2d((0, 0, 1, -1))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x + self.shift(x))


class Mixed(nn.Module):
    """Mixes tokens beside what it takes the place of."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x + x.cumsum(1) / 8)


class Convolution(nn.Module):
    """Is a layer among those of a model, and no block of transformers'."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Conv1d(width, width, 3, padding=1)

    def forward(self, hidden_states: Tensor, **others: Any) -> Tensor:
        return hidden_states + self.mix(hidden_states.transpose(1, 2)).transpose(1, 2)


class Indexing(LlamaForCausalLM):
    """Adds the first token's state to all in front of the head, by an index alone."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> CausalLMOutput:  # type: ignore[override]
        hidden = self.model(input_ids).last_hidden_state
        return CausalLMOutput(logits=self.lm_head(hidden + hidden[:, [0]]))


class Centering(LlamaForCausalLM):
    """Takes the mean of a sequence in a function of its own, and names the model inside of it once more."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> CausalLMOutput:  # type: ignore[override]
        def centered(x: Tensor) -> Tensor:
            return x - x.mean(1, keepdim=True)

        logits = self.lm_head(centered(self.model(input_ids).last_hidden_state))
        return CausalLMOutput(loss=self.loss_function(logits, labels, self.config.vocab_size), logits=logits)


class Naming(LlamaForCausalLM):
    """Names the model inside of it once more behind what lets tokens meet."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> CausalLMOutput:  # type: ignore[override]
        hidden = self.model(input_ids).last_hidden_state
        logits = self.lm_head(hidden - hidden.mean(1, keepdim=True))
        return CausalLMOutput(loss=self.loss_function(logits, labels, self.model.config.vocab_size), logits=logits)


class Measuring(LlamaForCausalLM):
    """Divides by the length of the sequence."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> CausalLMOutput:  # type: ignore[override]
        hidden = self.model(input_ids).last_hidden_state
        logits = self.lm_head(hidden) / hidden.shape[1]
        return CausalLMOutput(loss=self.loss_function(logits, labels, self.config.vocab_size), logits=logits)


class Skipping(LlamaForCausalLM):
    """Adds to hidden states what was whole before."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> CausalLMOutput:  # type: ignore[override]
        skip = self.model.embed_tokens(input_ids)
        logits = self.lm_head(self.model(input_ids).last_hidden_state + skip)
        return CausalLMOutput(loss=self.loss_function(logits, labels, self.config.vocab_size), logits=logits)


class Feeding(LlamaForCausalLM):
    """Runs the model inside of it twice: what it gave the first time goes in again."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> CausalLMOutput:  # type: ignore[override]
        first = self.model(input_ids).last_hidden_state
        logits = self.lm_head(self.model(inputs_embeds=first).last_hidden_state + first)
        return CausalLMOutput(loss=self.loss_function(logits, labels, self.config.vocab_size), logits=logits)


class ShiftingAttention(LlamaAttention):
    """Attends by transformers' functions, and sees the token before in its keys and values."""

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], attention_mask: Any, **_: Any
    ) -> tuple[Tensor, None]:
        seen = hidden_states + functional.pad(hidden_states, (0, 0, 1, -1))
        inputs = ((self.q_proj, hidden_states), (self.k_proj, seen), (self.v_proj, seen))
        query, key, value = (layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer, x in inputs)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", None)
        output, _ = attend(self, query, key, value, attention_mask, scaling=self.scaling)
        return self.o_proj(output.flatten(2)), None


def with_attention_that_shifts() -> nn.Module:
    model: Any = tiny_model("llama", "sdpa")
    for layer in model.model.layers:
        layer.self_attn.__class__ = ShiftingAttention
    return model


def with_other_feed_forwards() -> nn.Module:
    model: Any = tiny_model("llama")
    for layer in model.model.layers:
        layer.mlp = Shifted(layer.mlp)
    return model


def with_assigned_code() -> nn.Module:
    """What libraries of kernels and patches do to single modules."""
    model: Any = tiny_model("llama")
    for layer in model.model.layers:
        layer.mlp.forward = MethodType(lambda self, x: type(self).forward(self, x.roll(1, 1)), layer.mlp)
    return model


def with_assigned_ends() -> nn.Module:
    """What tensor parallelism and the loss put something around."""
    model: Any = tiny_model("llama")
    for end, before in ((model.model.embed_tokens, False), (model.lm_head, True)):
        end.forward = partial(_mixed, end.forward, before)
    return model


def _mixed(forward: Callable[[Tensor], Tensor], before: bool, x: Tensor) -> Tensor:
    return forward(x + x.cumsum(1) / 8) if before else forward(x) + forward(x).cumsum(1) / 8


def centered(x: Tensor) -> Tensor:
    return functional.silu(x - x.mean(1, keepdim=True))


def sharpened(factor: float, x: Tensor) -> Tensor:
    return functional.silu(factor * x)


def with_function(function: Callable[[Tensor], Tensor] = centered) -> nn.Module:
    model: Any = tiny_model("llama")
    for layer in model.model.layers:
        del layer.mlp.act_fn
        layer.mlp.act_fn = function
    return model


class AnyArguments(LlamaDecoderLayer):
    """Hands on what it is given."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def with_any_arguments() -> nn.Module:
    model: Any = tiny_model("llama")
    for layer in model.model.layers:
        layer.__class__ = AnyArguments
    return model


def with_another_norm() -> nn.Module:
    model: Any = tiny_model("llama")
    model.model.norm = Mixed(model.model.norm)
    return model


def with_another_head() -> nn.Module:
    model: Any = tiny_model("llama")
    model.lm_head = Mixed(model.lm_head)
    return model


def with_another_layer() -> nn.Module:
    model: Any = tiny_model("llama")
    torch.manual_seed(1)
    model.model.layers.insert(1, Convolution(model.config.hidden_size))
    model.config.num_hidden_layers += 1
    return model


def with_code_of(model_class: type) -> nn.Module:
    model: Any = tiny_model("llama")
    model.__class__ = model_class
    return model


def with_code_of_its_own() -> nn.Module:
    return with_code_of(Indexing)


CHANGED: list[Callable[[], nn.Module]] = [
    *(with_other_feed_forwards, with_assigned_code, with_assigned_ends, with_any_arguments, with_another_norm),
    *(with_function, with_another_layer, with_code_of_its_own, with_another_head),
]


def errors(sizes: dict[str, int], config: FSDP2Config, makers: list[Callable[[], nn.Module]]) -> dict[str, Any]:
    """Runs on each rank."""
    schedule = Schedule(steps=1, micro_batches=1, clip=None)
    return {make.__name__: compare(make, sizes, dist.get_world_size(), schedule, config).largest for make in makers}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "config", "makers"),
    [
        ({"cp": 2}, FSDP2Config(), [*CHANGED, with_attention_that_shifts]),
        ({"tp": 2}, FSDP2Config(sequence_parallel=True), CHANGED[:-1]),  # a plan splits no head that is a user's
    ],
    ids=["cp", "tp-sp"],
)
def test_they_have_the_numbers_of_one_process(sizes: Any, config: Any, makers: Any, pool2: Pool) -> None:
    for found in pool2.run(errors, sizes, config, makers):
        assert {name: error for name, error in found.items() if error[0] > BOUND} == {}


def errors_of_losses(classes: list[type]) -> dict[str, Any]:
    """Runs on each rank: of classes that call transformers' loss behind code of their own."""
    schedule = Schedule(steps=1, micro_batches=2, clip=None)
    return {c.__name__: compare(partial(with_code_of, c), {"cp": 2}, 2, schedule).largest for c in classes}


def test_hidden_states_that_meet_in_front_of_the_head(pool2: Pool) -> None:
    classes = [Centering, Naming, Measuring, Skipping, Feeding]
    for found in pool2.run(errors_of_losses, classes):
        assert {name: error for name, error in found.items() if error[0] > BOUND} == {}


def by_places(module: nn.Module, *args: Any, **others: Any) -> tuple[Tensor, None]:
    """Attend, and weigh what each query gets by its place in what is given."""
    output, _ = sdpa_attention_forward(module, *args, **others)
    return output * torch.linspace(1, 2, output.shape[1])[:, None, None], None


def error_of_a_registered_function() -> float:
    """Runs on each rank."""
    AttentionInterface.register("sdpa", by_places)
    try:
        return compare(partial(tiny_model, "llama", "sdpa"), {"cp": 2}, 2, Schedule(steps=1)).largest[0]
    finally:
        AttentionInterface.register("sdpa", sdpa_attention_forward)


def test_a_function_that_takes_the_name_of_another_sees_the_whole_sequence(pool2: Pool) -> None:
    assert max(pool2.run(error_of_a_registered_function)) < BOUND


def with_code_that_gives(change: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
    model: Any = tiny_model("llama")
    for layer in model.model.layers:
        layer.mlp.forward = MethodType(lambda self, x: change(type(self).forward(self, x), x), layer.mlp)
    return model


def with_scaled_sums() -> nn.Module:
    return with_code_that_gives(lambda output, x: 0.5 * output)


def change_sums() -> tuple[float, list[str]]:
    """Runs on each rank: the largest error of code that keeps a sum one, and what is said of code that does not."""
    schedule, said = Schedule(steps=1, micro_batches=1, clip=None), []
    for change in (lambda output, x: output + 0.1, lambda output, x: output + 0.1 * torch.randn_like(x)):
        with pytest.raises(ValueError, match="summed over the tp ranks as a whole") as caught:
            compare(partial(with_code_that_gives, change), {"tp": 2}, 2, schedule)
        said.append(str(caught.value))
    return compare(with_scaled_sums, {"tp": 2}, 2, schedule).largest[0], said


def test_assigned_code_is_to_keep_sums(pool2: Pool) -> None:
    for error, said in pool2.run(change_sums):
        assert error < BOUND
        assert all("add adds to it what every rank has" in text for text in said)


def test_which_modules_of_torch_work_on_features() -> None:
    alone = [nn.Linear(4, 4), nn.LayerNorm(4), nn.RMSNorm(4), nn.SiLU(), nn.Softmax(dim=-1), nn.Sequential(nn.GELU())]
    mixing = [nn.ZeroPad2d(1), nn.Softmax(dim=1), nn.LayerNorm((8, 4)), nn.GroupNorm(1, 8), nn.GLU(1), nn.PReLU(8)]
    assert all(map(keeps_tokens_apart, alone))
    assert not any(map(keeps_tokens_apart, [*mixing, nn.AvgPool2d(3), nn.ConvTranspose1d(8, 8, 1)]))


def test_functions_among_attributes_are_read() -> None:
    functions: list[Any] = [functional.silu, partial(sharpened, 2.0), centered, lambda x: x.sigmoid()]
    feed_forwards = [with_function(function).model.layers[0].mlp for function in functions]  # type: ignore[union-attr]
    assert list(map(keeps_tokens_apart, feed_forwards)) == [True, True, False, False]


def test_a_plain_model_hands_rows_to_its_head() -> None:
    layout = derive_context_layout(tiny_model("llama"))
    assert layout.models == {"": True, "model": True}
    assert layout.lists[0].gathered_after == set()
    assert not derive_context_layout(with_code_of_its_own()).models[""]
