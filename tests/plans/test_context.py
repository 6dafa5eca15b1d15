"""What context parallelism finds in the structure of models."""

import pytest
from bitsandbytes.nn import Linear4bit
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear
from transformers import CONFIG_MAPPING, ViTMAEConfig, ViTMAEForPreTraining
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lightning_automodel.plans.context import (
    Treatment,
    derive_context_layout,
    handed_to_children,
    hands_on,
    treatment_of,
)
from tests.support.families import tiny_model

KINDS = {
    "llama": {"LlamaAttention": "ATTENTION"},
    "deepseek_v3": {"DeepseekV3Attention": "ATTENTION"},
    "gpt_oss": {"GptOssAttention": "ATTENTION"},
    "qwen3_next": {"Qwen3NextGatedDeltaNet": "GATHERED"},
    "lfm2_moe": {"Lfm2MoeShortConv": "GATHERED", "Lfm2MoeAttention": "ATTENTION"},
    "deepseek_v32": {"DeepseekV32Attention": "GATHERED"},  # an indexer inside
    "doge": {"DogeAttention": "GATHERED"},  # its mask is made of values
}


@pytest.mark.parametrize("family", KINDS)
def test_kinds_of_children(family: str) -> None:
    model = tiny_model(family)
    layout = derive_context_layout(model)
    found = {type(model.get_submodule(name)).__name__: kind.name for name, kind in layout.children.items()}
    assert found.items() >= KINDS[family].items()
    assert all(name.endswith(("Attention", "DeltaNet", "Conv")) for name in found)


def test_blocks_behind_a_model_that_has_blocks_see_another_sequence() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    decoder = {"decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2}
    layout = derive_context_layout(ViTMAEForPreTraining(ViTMAEConfig(image_size=16, patch_size=4, **sizes, **decoder)))
    assert [entry.holder for entry in layout.lists] == ["vit"]


class Shifts(nn.Module):
    """Takes a state beside the stream: nobody knows what it does with it."""

    def forward(self, hidden: Tensor, state: Tensor) -> Tensor:
        return hidden + state


class Widens(nn.Module):
    def forward(self, hidden_states: Tensor, residual: Tensor) -> Tensor:
        return hidden_states + residual


def test_what_is_not_proven_sees_the_whole_sequence() -> None:
    assert treatment_of(Shifts()) is Treatment.GATHERED
    assert treatment_of(nn.Sequential(nn.Linear(2, 2), nn.Conv1d(2, 2, 1))) is Treatment.GATHERED
    assert treatment_of(Widens()) is Treatment.TOKENWISE
    assert treatment_of(nn.LayerNorm(3)) is Treatment.TOKENWISE


def test_linear_layers_of_libraries_keep_tokens_apart() -> None:
    layers = [Float8Linear(2, 2, config=Float8LinearConfig()), Linear4bit(2, 2)]
    assert [treatment_of(nn.Sequential(layer, nn.SiLU())) for layer in layers] == [Treatment.TOKENWISE] * 2


class Tabulated(nn.Module):
    """Attention in which ``cache`` is no cache of keys and values."""

    def forward(self, hidden_states: Tensor, cache: Tensor) -> Tensor:
        return ALL_ATTENTION_FUNCTIONS["sdpa"](self, hidden_states, hidden_states + cache, hidden_states, None)[0]


def test_a_cache_of_users_may_be_anything() -> None:
    assert treatment_of(Tabulated()) is Treatment.GATHERED


@pytest.mark.skipif("inkling2_text" not in CONFIG_MAPPING, reason="this version of transformers does not have it")
def test_attention_within_a_token_works_on_rows() -> None:
    layout = derive_context_layout(tiny_model("inkling2_text"))
    assert "model.layers.1.self_attn" in layout.children
    assert not {"model.layers.1.attention_input", "model.layers.1.mlp_input"} & layout.children.keys()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Widens()

    def forward(self, hidden: Tensor, memory: Tensor, scale: Tensor) -> Tensor:
        return self.inner(hidden, residual=memory) * scale


def test_arguments_that_a_block_only_hands_to_children() -> None:
    assert handed_to_children(Block()) == {"hidden", "memory"}


def test_hidden_states_leave_as_rows_only_to_heads() -> None:
    model = tiny_model("llama")
    assert hands_on(model, "model")
    assert not hands_on(model, "lm_head_of_another_name")
    assert derive_context_layout(model).models == {"": True, "model": True}
    assert all(derive_context_layout(tiny_model("gemma3")).models.values())  # hands on what its tower gave, too
    assert not derive_context_layout(tiny_model("doge")).models[""]  # its head is one of several ways on


def test_encoders_with_decoders_stay_whole() -> None:
    assert derive_context_layout(tiny_model("florence2")).lists == []
