"""What the plans of single classes lack or get wrong, as data: rules that complete the model's own, by class name."""

_INKLING = {"model.layers.*.mlp.experts.gate_up_proj": "packed_colwise"}  # gate and up are fused, the plan says colwise

ADDITIONS: dict[str, dict[str, str]] = {
    "DogeForCausalLM": {
        "model.layers.*.self_attn.dt_proj": "rowwise_split_output",  # mixes all heads, and each head takes its own
        "model.layers.*.self_attn.A": "colwise",
        "model.layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
        "model.layers.*.self_attn.k_norm": "replicated_with_grad_allreduce",
    },
    "InklingForCausalLM": _INKLING,
    "InklingTextForCausalLM": _INKLING,
    "Inkling2ForCausalLM": _INKLING,
    "Inkling2TextForCausalLM": _INKLING,
}

WHOLE_BETWEEN_BLOCKS = {"Inkling2ForCausalLM", "Inkling2TextForCausalLM"}
"""Classes that compute with the stream between their blocks: sequence parallelism gathers it after each block."""
