"""Models that somebody wrote: transformers' base classes, and code in which tokens meet in places that nobody names."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

WIDTH, HEADS, VOCABULARY = 32, 4, 128


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of [batch, seq, width]."""
    q, k, v = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """Takes the stream alone."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.o(attend(self.q(x), self.k(x), self.v(x)))


class Shift(nn.Module):
    """Has no parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.pad(x, (0, 0, 1, -1))


class MLP(nn.Module):
    """Treats every token alone."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x)))


class Block(nn.Module):
    """Attention and shift are children."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.shift, self.mlp = nn.LayerNorm(WIDTH), Attention(), Shift(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(self.shift(x))


class BlockThatAttends(nn.Module):
    """Attention is its own code."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), MLP()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + attend(self.q(h), self.k(h), self.v(h))
        return x + self.mlp(x)


class Body(PreTrainedModel):
    """Tokens meet between its blocks as well, if ``mixes``."""

    config_class = PreTrainedConfig

    def __init__(self, config: Any, block: type[nn.Module], mixes: bool) -> None:
        super().__init__(config)
        self.embed, self.norm, self.mixes = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH), mixes
        self.layers = nn.ModuleList(block() for _ in range(2))

    def forward(self, input_ids: Tensor) -> BaseModelOutput:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
            if self.mixes:
                x = x + x.cumsum(1) / x.shape[1]
        return BaseModelOutput(last_hidden_state=self.norm(x) + x.mean(1, keepdim=True))


class Own(PreTrainedModel):
    """A causal language model."""

    config_class = PreTrainedConfig
    base_model_prefix = "body"

    def __init__(self, config: Any, block: type[nn.Module], mixes: bool) -> None:
        super().__init__(config)
        self.body, self.lm_head = Body(config, block, mixes), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> CausalLMOutput:
        logits = self.lm_head(self.body(input_ids).last_hidden_state)
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=VOCABULARY)
        return CausalLMOutput(loss=loss, logits=logits)


def own_model(block: type[nn.Module], mixes: bool) -> Own:
    """Build one, the same on every rank."""
    torch.manual_seed(0)
    return Own(PreTrainedConfig(hidden_size=WIDTH, vocab_size=VOCABULARY), block, mixes)
