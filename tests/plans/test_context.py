"""What context parallelism finds in the structure of models."""

import pytest
from torch import Tensor, nn
from transformers import ViTMAEConfig, ViTMAEForPreTraining

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
    assert not derive_context_layout(tiny_model("doge")).models[""]  # its head is one of several ways on


def test_encoders_with_decoders_stay_whole() -> None:
    assert derive_context_layout(tiny_model("florence2")).lists == []
