"""Tiny models and custom plans for the tests of the functional API."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn import functional
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from tests.support.comparison import Schedule
from tests.support.families import tiny_model

BOUND = 1e-5
SCHEDULE = Schedule(steps=2, length=12)
SIZES: dict[str, Any] = dict(hidden_size=48, num_attention_heads=4, vocab_size=131, use_cache=False)


def with_vectors(model: nn.Module) -> nn.Module:
    """Moves norms and biases away from their trivial initial values."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim <= 1:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def build_llama() -> nn.Module:
    """With a vocabulary and a feed-forward width that two ranks do not divide."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **SIZES, intermediate_size=65, num_hidden_layers=3, num_key_value_heads=2, head_dim=8, mlp_bias=True
    )
    return with_vectors(LlamaForCausalLM(config))


def build_opt() -> nn.Module:
    """A model that publishes no plan; the names of its layers tell one."""
    torch.manual_seed(0)
    config = OPTConfig(
        **SIZES, ffn_dim=64, num_hidden_layers=2, max_position_embeddings=64, word_embed_proj_dim=48, dropout=0.0
    )
    return with_vectors(OPTForCausalLM(config))


def build_reformer() -> nn.Module:
    """A model without a plan, whose blocks run outside of their forward pass."""
    return tiny_model("reformer")


def build_gpt2() -> nn.Module:
    """Its matrices are [in, out], and queries, keys and values lie one above the other."""
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=128, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return with_vectors(GPT2LMHeadModel(config))


class Packed(nn.Module):
    """A feed-forward network whose gate and up projections are one matrix, with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(48, 128), nn.Linear(64, 48)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(functional.silu(gate) * up)


PACKED_PLAN = {"model.layers.*.mlp.gate_up": "packed_colwise", "model.layers.*.mlp.down": "rowwise"}


def build_packed() -> nn.Module:
    """The model of :func:`build_llama` with packed projections."""
    model = build_llama()
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.mlp = Packed()
    return model


_LAYER = "model.decoder.layers.*"
OPT_PLAN: Mapping[str, str | ParallelStyle] = {
    "model.decoder.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
    f"{_LAYER}.self_attn": "split_heads",
    f"{_LAYER}.self_attn.q_proj": ColwiseParallel(),
    f"{_LAYER}.self_attn.k_proj": ColwiseParallel(),
    f"{_LAYER}.self_attn.v_proj": ColwiseParallel(),
    f"{_LAYER}.self_attn.out_proj": RowwiseParallel(),
    f"{_LAYER}.fc1": ColwiseParallel(output_layouts=Replicate()),
    f"{_LAYER}.fc2": RowwiseParallel(input_layouts=Replicate()),
}


def opt_plan() -> Mapping[str, str | ParallelStyle]:
    """As an import path may name it."""
    return OPT_PLAN


def plan_of_model(model: nn.Module) -> dict[str, str]:
    """The same with styles by name, from the model."""
    assert isinstance(model, OPTForCausalLM)
    return {
        f"{_LAYER}.self_attn": "split_heads",
        **{f"{_LAYER}.self_attn.{name}_proj": "colwise" for name in "qkv"},
        f"{_LAYER}.self_attn.out_proj": "rowwise",
        f"{_LAYER}.fc1": "colwise",
        f"{_LAYER}.fc2": "rowwise",
    }


class NoStyles:
    """What an import path must not name."""
