"""The sizes of tiny configs, by the names of their fields; by model type where names do not say enough. Data only."""

from typing import Any

WIDTH = 96  # differs from heads x head_dim, so that the two cannot be mixed up
TOWER_WIDTH = 64

SMALL: dict[str, Any] = {
    "vocab_size": 128,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim", "emb_dim"), WIDTH),
    **dict.fromkeys(("intermediate_size", "n_inner", "d_ff", "ffn_dim", "ffn_hidden_size", "hidden_dim"), 128),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 128),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    "num_key_value_heads": 2,
    **dict.fromkeys(("head_dim", "d_kv"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 128),
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
    **dict.fromkeys(("moe_hidden_size", "moe_shared_expert_intermediate_size", "shared_experts_intermediate_size"), 64),
    # latent attention
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    # linear attention and state spaces
    **dict.fromkeys(("linear_num_heads", "index_n_heads"), 4),
    "linear_head_dim": 16,
    "index_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "chunk_size": 16,
    "mamba_chunk_size": 16,
    # per-layer sizes
    **dict.fromkeys(("global_head_dim", "swa_head_dim"), 16),
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 128,
    "num_kv_shared_layers": 0,
    # between a tower and the language model
    **dict.fromkeys(("projector_hidden_size", "projection_hidden_size", "alignment_intermediate_size"), 64),
    "merged_hidden_size": 64,
    **dict.fromkeys(("projection_dim", "out_hidden_size"), WIDTH),
    **dict.fromkeys(("mm_tokens_per_image", "num_query_tokens", "latent_query_num"), 4),
    "image_grid_pinpoints": [[56, 56]],
    "vision_hidden_size": TOWER_WIDTH,
    # two runs are compared, so nothing may be dropped at random
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "embd_pdrop", "resid_pdrop", "attn_pdrop"), 0.0),
    **dict.fromkeys(("residual_dropout", "dropout", "dropout_rate", "activation_dropout", "embedding_dropout"), 0.0),
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "projector_dropout", "layerdrop"), 0.0),
}

TOWER: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "embed_dim", "mlp_dim", "d_model"), TOWER_WIDTH),
    **dict.fromkeys(("encoder_ffn_dim", "projection_hidden_dim", "projection_intermediate_size"), TOWER_WIDTH),
    **dict.fromkeys(("patch_embed_hidden_size", "encoder_hidden_size", "hidden_size_global", "d_ff"), TOWER_WIDTH),
    **dict.fromkeys(("output_channels", "base_channels", "latent_channels", "downsample_hidden_size"), 32),
    **dict.fromkeys(("codebook_size", "image_token_embed_dim"), 64),
    "max_img_size": 112,
    **dict.fromkeys(("num_hidden_layers", "depth", "n_layers", "encoder_layers", "num_global_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "num_key_value_heads", "attention_heads"), 2),
    **dict.fromkeys(("encoder_attention_heads", "resampler_n_heads", "resampler_depth"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "resampler_head_dim"), 32),
    "image_size": 56,
    "patch_size": 14,
    "resampler_n_latents": 4,
    "global_attn_indexes": [1],
    "deepstack_visual_indexes": [0],
    "initializer_range": 0.02,
    **dict.fromkeys(("pos_emb_height", "pos_emb_width"), 8),
    "num_position_embeddings": 16,
    "max_position_embeddings": 64,
    # what a tower hands to the language model
    **dict.fromkeys(("out_hidden_size", "text_hidden_size", "projection_dim", "output_dim", "adapter_out_dim"), WIDTH),
    **dict.fromkeys(("attention_dropout", "dropout", "hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
    **dict.fromkeys(("drop_path_rate", "dropout_rate", "projection_dropout", "activation_dropout"), 0.0),
}

_PADDED = {"vocab_size": 136, "unpadded_vocab_size": 128}
_INKLING2 = {**_PADDED, "layer_types": ["hybrid_sliding", "hybrid"], "rel_extent": 16}
_LATENT = {"num_key_value_heads": 4}
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}


def _all(*types: str, **fields: Any) -> dict[str, dict[str, Any]]:
    """The same fields for several model types."""
    return {name: fields for name in types}


def _mrope(*section: int, **fields: Any) -> dict[str, Any]:
    """Rotary positions in three dimensions; the sections add up to half of what is rotated of a head."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(section), **fields}}


SPECIAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "minicpm3"),
        _LATENT,
    ),
    **dict.fromkeys(("youtu", "dots3_note_text", "mistral_large4_text", "sarvam_mla"), _LATENT),
    "glm5_next_text": {**_LATENT, "qk_rope_head_dim": 0, "mlp_layer_types": ["dense", "sparse"]},
    **dict.fromkeys(
        ("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text", "glm4v_text", "glm_ocr_text"), _mrope(4, 4, 4)
    ),
    "glm4v_moe_text": _mrope(2, 2, 2, partial_rotary_factor=0.5),
    **dict.fromkeys(("paddleocr_vl_text", "hunyuan_vl_text", "cosmos3_edge_text"), _mrope(4, 2, 2)),
    **_all("beam", "step3p5", mlp_layer_types=["dense", "sparse"]),
    "granitemoehybrid": {"mamba_n_heads": 12},
    "helium": {"head_dim": 24},
    # published configs have it, the class's own lacks a default
    **_all("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker", vision_start_token_id=5),
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
    "mistral4": _LATENT,
    "hy_v4_vl_text": _mrope(4, 2, 2),
    "inkling_text": _PADDED,
    "inkling2_text": _INKLING2,
    "inkling2_loop_text": {
        **_INKLING2,
        "n_layers_per_attn_res_block": 1,
        **{"loop_layer_index_start": 1, "loop_layer_index_end": 2, "loop_gate_rank": 16},
    },
    # families without a plan
    "bamba": {"mamba_n_heads": 12, "mamba_d_head": 16},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "cpmant": {"dim_ff": 128},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "roc_bert": {"shape_vocab_size": 128, "pronunciation_vocab_size": 128},
    **_all("codegen", "gptj", rotary_dim=16),
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "mamba2": {"num_heads": 12, "n_groups": 2},
    # Attention by hashes takes a new seed in every run, so no two runs are equal.
    "reformer": {
        "is_decoder": True,
        "axial_pos_embds": False,
        "attn_layers": ["local", "local"],
        "local_attention_probs_dropout_prob": 0.0,
    },
    "xlm": {"n_words": 128},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["hybrid", "hybrid"]},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2},
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
    # models that read images
    "apertus1p5": {"image_token_offset": 104, "audio_token_offset": 120},
    "apertus1p5_vision_tokenizer": {"codebook_size": 16},
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "chameleon_vqgan": {
        **{"num_embeddings": 10, "embed_dim": 32, "latent_channels": 32, "resolution": 56, "base_channels": 32},
        "channel_multiplier": [1, 1, 1, 1],
        "num_res_blocks": 1,
    },
    "chameleon": {"vocabulary_map": {"<image>": 100, **{f"IMGIMG{chr(65 + i)}Z": 101 + i for i in range(10)}}},
    "deepseek_ocr2_sam_vision_model": {"downsample_channels": [32, TOWER_WIDTH]},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"], **_LATENT},
    "diffusion_gemma": {"canvas_length": 16},
    "diffusion_gemma_text": {"top_k_experts": 2},
    "dots3_note_audio_encoder": {"adapter_input_size": TOWER_WIDTH},
    "dots3_note_vision_encoder": {
        **dict.fromkeys(("embed_dim", "adapter_in_dim"), TOWER_WIDTH),
        "mlp_layer_types": ["dense", "sparse"],
        "moe_intermediate_size": 32,
    },
    "emu3": {"vocabulary_map": {"<image>": 100, **{f"<|visual token {i:06d}|>": 101 + i for i in range(16)}}},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [64, 64], **_mrope(4, 4, 4)},
    "florence_vision": {
        "patch_size": [7, 3, 3, 3],
        "depths": [1, 1, 1, 1],
        "num_groups": [2, 2, 2, 2],
        "window_size": 4,
    },
    "flint": {"mlp_only_layers": [0]},
    "fuyu": {"image_size": 56, "patch_size": 14},
    "gemma4_unified_vision": {
        "mm_embed_dim": 64,
        "mm_posemb_size": 16,
        "output_proj_dims": 64,
        "pooling_kernel_size": 1,
    },
    "granite4_vision": {
        "deepstack_layer_map": [[0, 0]],
        "spatial_target_layers": [0, 0, 1, 1],
        "downsample_rate": "1/2",
    },
    "janus_vqgan": {"num_embeddings": 16},
    "llama4_text": {"intermediate_size_mlp": 128},
    "llama4_vision_model": {
        "intermediate_size": 256,
        "vision_output_dim": 64,
        "projector_input_dim": 64,
        "projector_output_dim": 64,
    },
    **_all("minicpm_ocr", "minicpmv4_6", "minicpmv4_7", patch_size=14),
    **_all("minicpm_ocr_vision", "minicpmv4_6_vision", "minicpmv4_7_vision", insert_layer_id=0, image_size=56),
    "mllama_vision_model": {"intermediate_layers_indices": [0, 1], "vision_output_dim": 3 * TOWER_WIDTH},
    "mllama_text_model": {"cross_attention_layers": [1]},
    "molmo2_adapter": {"vision_feature_layer": [0, 1]},
    **_all("muse_glimmer", "muse_spark", out_hidden_size=4 * TOWER_WIDTH),
    "muse_spark_audio": {"patch_sizes": [16, 6], "hidden_sizes": [32, 64], "depths": [1, 1]},
    "kosmos_2_5_vision_model": {"patch_embed_hidden_size": 588, "seq_len": 16},
    "hy_v4_vl_vision": {"max_image_size": 56},
    "instructblipvideo": {"video_token_index": 100},
    "pi0": {"loss_reduction": "mean", "max_state_dim": 32, "max_action_dim": 32, "chunk_size": 16},
    "ovis2_vision": {"vocab_size": 64},
    "pix2struct_text_model": {"d_kv": 24},
    "pix2struct_vision_model": {"hidden_size": WIDTH, "patch_embed_hidden_size": 588, "seq_len": 16},
    "pp_formulanet_vision": {
        "post_conv_in_channels": 32,
        "post_conv_mid_channels": 48,
        "post_conv_out_channels": 64,
        "decoder_hidden_size": WIDTH,
    },
    "qwen2_vl_vision": {"hidden_size": WIDTH},
    "radio": {"video_temporal_patch_size": 2},
    "udop": {"decoder_start_token_id": 0, "image_size": 56, "patch_size": 14},
    "unlimited_ocr_sam_vision_model": {"downsample_channels": [32, TOWER_WIDTH]},
    "unlimited_ocr_text": _LATENT,
    "wavtokenizer_encoder": {"codebook_dim": TOWER_WIDTH, "codebook_size": 8},
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "vision-encoder-decoder": {"pad_token_id": 0, "decoder_start_token_id": 1},
}
