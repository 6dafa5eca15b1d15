"""Tiny models of every family of transformers: the real classes, with configs shrunk by the names of their fields."""

import dataclasses
import inspect
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

MOST_PARAMETERS = 20_000_000

SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 96,  # differs from heads x head_dim, so that the two cannot be mixed up
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sliding_window": 16,
    # mixture of experts
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "shared_expert_intermediate_size": 64,
    "decoder_sparse_step": 1,
    # latent attention
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    # linear attention
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    # per-layer sizes
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 128,
    "num_kv_shared_layers": 0,
    # two runs are compared, so nothing may be dropped at random
    **dict.fromkeys(
        ("attention_dropout", "hidden_dropout", "embd_pdrop", "resid_pdrop", "attn_pdrop", "residual_dropout"), 0.0
    ),
}

_LATENT = {"num_key_value_heads": 4}
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
SPECIAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "minicpm3"),
        _LATENT,
    ),
    **dict.fromkeys(
        ("youtu", "dots3_note_text"),
        _LATENT,
    ),
    "granitemoehybrid": {"mamba_n_heads": 12},
    "helium": {"head_dim": 24},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3_text": {"query_pre_attn_scalar": 16},
    "hunyuan_v1_moe": {"moe_topk": 2},
    "deepseek_v4": {"mlp_layer_types": ["moe", "moe"]},
    "cohere_compass_text": {
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE},
    },
    "lfm2_moe": {"layer_types": ["full_attention", "conv"], "num_dense_layers": 1},
    "longcat_flash": {
        **_LATENT,
        "num_layers": 2,
        "ffn_hidden_size": 128,
        "expert_ffn_hidden_size": 64,
        "zero_expert_num": 2,
        "moe_topk": 2,
    },
    "phi4_multimodal": {
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "crop_size": 28,
            "image_size": 28,
            "patch_size": 14,
            "image_token_id": 100,
        },
        "audio_config": {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_blocks": 1,
            "num_attention_heads": 2,
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
            "nemo_conv_channels": 8,
            "input_size": 16,
            "audio_token_id": 101,
        },
    },
}


def causal_families(with_plan: bool = True) -> list[str]:
    """Model types of causal language models, with or without a tensor-parallel plan of their own."""
    return [
        name
        for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if name in CONFIG_MAPPING and bool(getattr(CONFIG_MAPPING[name], "base_model_tp_plan", None)) == with_plan
    ]


def tiny_config(family: str, **changes: Any) -> PreTrainedConfig:
    """The family's config with every size of :data:`SMALL` that it has."""
    config_class = CONFIG_MAPPING[family]
    if family == "llama4":
        return config_class(text_config=tiny_config("llama4_text", **changes).to_dict())
    if dataclasses.is_dataclass(config_class):
        known = {field.name for field in dataclasses.fields(config_class)}
    else:
        known = set(inspect.signature(config_class.__init__).parameters)
    values = {**SMALL, **SPECIAL.get(family, {}), **changes}
    return config_class(**{name: value for name, value in values.items() if name in known})


def tiny_model(family: str, attention: str = "eager", **changes: Any) -> nn.Module:
    """A tiny model in float32, drawn from a fixed seed, with vectors that are not at their trivial initial values.

    Raises:
        RuntimeError: if the config still makes a large model.
    """
    config = tiny_config(family, **changes)
    config.use_cache = False
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    size = sum(p.numel() for p in model.parameters())
    if size > MOST_PARAMETERS:
        raise RuntimeError(f"{family} has {size / 1e6:.0f} M parameters with the tiny config")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim <= 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model
