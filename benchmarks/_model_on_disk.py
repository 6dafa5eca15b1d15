"""The model that the benchmarks of loading and saving share."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

GB = 10**9
VALUE = 0.01  # of every weight


def config(layers: int) -> LlamaConfig:
    """A Llama of 131 + 47 x layers million parameters."""
    return LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=32_000,
        tie_word_embeddings=False,
        use_cache=False,
    )


def write_model(directory: Path, layers: int) -> int:
    """Saves a model with arbitrary bfloat16 weights, in files of about 200 MB; returns its bytes."""
    with torch.device("meta"):
        model = LlamaForCausalLM(config(layers))
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(VALUE)
    model.save_pretrained(directory, max_shard_size="200MB")
    return sum(p.nbytes for p in model.parameters())
