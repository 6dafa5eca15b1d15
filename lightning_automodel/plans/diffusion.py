"""Tensor-parallel plans of video transformers of diffusers, by class name: data for :mod:`plans.additions`."""

Rules = dict[str, str]


def _under(prefix: str, rules: Rules) -> Rules:
    return {f"{prefix}.{name}" if name else prefix: style for name, style in rules.items()}


_ATTENTION = {
    "": "split_heads",
    "to_q": "colwise",
    "to_k": "colwise",
    "to_v": "colwise",
    "to_out.0": "rowwise",
}
_NORMS_ACROSS_HEADS = {"norm_q": "norm_across_heads", "norm_k": "norm_across_heads"}
_IMAGE_KEYS = {"add_k_proj": "colwise", "add_v_proj": "colwise", "norm_added_k": "norm_across_heads"}
_JOINT_ATTENTION = {
    **_ATTENTION,
    "": "split_heads_all_outputs",
    "add_q_proj": "colwise",
    "add_k_proj": "colwise",
    "add_v_proj": "colwise",
    "to_add_out": "rowwise",
}
_FEED_FORWARD = {"net.0.proj": "colwise", "net.2": "rowwise"}
_LTX2_ATTENTION = {**_ATTENTION, **_NORMS_ACROSS_HEADS, "to_gate_logits": "colwise"}
_LTX2_ATTENTIONS = ("attn1", "attn2", "audio_attn1", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn")
_LTX2_ROTARY = ("rope", "audio_rope", "cross_attn_rope", "cross_attn_audio_rope")
_LTX2_BLOCK = "transformer_blocks.*"

PLANS: dict[str, Rules] = {
    "WanTransformer3DModel": {
        **_under("blocks.*.attn1", _ATTENTION | _NORMS_ACROSS_HEADS),
        **_under("blocks.*.attn2", _ATTENTION | _NORMS_ACROSS_HEADS | _IMAGE_KEYS),
        **_under("blocks.*.ffn", _FEED_FORWARD),
    },
    "HunyuanVideo15Transformer3DModel": {
        **_under("transformer_blocks.*.attn", _JOINT_ATTENTION),
        **_under("transformer_blocks.*.ff", _FEED_FORWARD),
        **_under("transformer_blocks.*.ff_context", _FEED_FORWARD),
        **_under("context_embedder.token_refiner.refiner_blocks.*.attn", _ATTENTION),
        **_under("context_embedder.token_refiner.refiner_blocks.*.ff", _FEED_FORWARD),
    },
    "LTX2VideoTransformer3DModel": {
        **{rope: "split_rotary" for rope in _LTX2_ROTARY},
        **{k: v for name in _LTX2_ATTENTIONS for k, v in _under(f"{_LTX2_BLOCK}.{name}", _LTX2_ATTENTION).items()},
        **_under(f"{_LTX2_BLOCK}.ff", _FEED_FORWARD),
        **_under(f"{_LTX2_BLOCK}.audio_ff", _FEED_FORWARD),
    },
}
