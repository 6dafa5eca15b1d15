"""What the plans of single classes lack or get wrong, as data: rules that complete the model's own, by class name.

Names are those inside of the class. Wherever a model holds a module of the class, a composite one its language model,
the rules apply with the prefix of that module.
"""

from collections.abc import Mapping

from torch.distributed.tensor.parallel import ParallelStyle

from lightning_automodel.plans import diffusion

_FUSED_EXPERTS = {"layers.*.mlp.experts.gate_up_proj": "packed_colwise"}  # gate and up; the plan says colwise
_INKLING = ("Inkling", "Inkling2", "Inkling2Loop")
_HEAD = {"lm_head": "colwise_gather_output"}  # the plan splits the input: every rank would hold all logits

ADDITIONS: dict[str, Mapping[str, str | ParallelStyle]] = {
    "DogeModel": {
        "layers.*.self_attn.dt_proj": "rowwise_split_output",  # mixes all heads, and each head takes its own
        "layers.*.self_attn.A": "colwise",
        "layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
        "layers.*.self_attn.k_norm": "replicated_with_grad_allreduce",
    },
    "DeciLMForCausalLM": {  # Nemotron-NAS: code of the hub, of Llama's names; layers may lack either half
        **{f"model.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
        "model.layers.*.self_attn.o_proj": "rowwise",
        "model.layers.*.mlp.gate_proj": "colwise",
        "model.layers.*.mlp.up_proj": "colwise",
        "model.layers.*.mlp.down_proj": "rowwise",
        **_HEAD,
    },
    "GptOssModel": {  # gate and up alternate
        "layers.*.mlp.experts": "moe_tp_experts",
        "layers.*.mlp.experts.gate_up_proj": "turned_colwise",
        "layers.*.mlp.experts.gate_up_proj_bias": "turned_colwise",
        "layers.*.mlp.experts.down_proj": "turned_rowwise",
        "layers.*.mlp.experts.down_proj_bias": "turned_rowwise",
    },
    "JetMoeModel": {  # its attention has experts, too, which stay whole
        "layers.*.mlp.input_linear": "packed_colwise",
        "layers.*.mlp.output_linear": "rowwise",
        "layers.*.self_attention.kv_proj": "colwise_gather_output",
    },
    "MuseSparkTextModel": {  # a norm stands behind each expert: they are divided whole
        "layers.*.mlp.experts": "ep_dispatch_experts",
        "layers.*.mlp.experts.post_expert_norm": "replicated_with_grad_allreduce",
        "layers.*.mlp.experts.gate_up_proj": "grouped_gemm",
        "layers.*.mlp.experts.down_proj": "grouped_gemm",
    },
    "NeoMMEModel": {  # values that layers share are added to those of all heads, and each head has a number of its own
        **{f"layers.*.self_attn.{name}_proj": "colwise_gather_output" for name in "qkv"},
        "layers.*.self_attn.output_projection.gate_proj": "colwise_gather_output",
        "layers.*.self_attn.output_projection.o_proj": "colwise_gather_output",
    },
    "ZayaModel": {
        "layers.*.mlp": "separate",  # its router gives its states to the next layer's
        "layers.*.mlp.experts": "moe_tp_experts",
        "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
        "layers.*.mlp.experts.down_proj": "rowwise",
    },
    "GPTNeoXModel": {"layers.*.attention.query_key_value": "interleaved_colwise"},
    **dict.fromkeys(("InklingTextModel", "Inkling2TextModel", "Inkling2LoopTextModel"), _FUSED_EXPERTS),
    **{f"{name}For{task}": _HEAD for name in _INKLING for task in ("CausalLM", "ConditionalGeneration")},
    "ChameleonForConditionalGeneration": {"lm_head": "replicate"},  # it writes into its logits
    **diffusion.PLANS,
}

CORRECTIONS: dict[str, Mapping[str, str]] = {
    "CodeGenModel": {"h.*.attn.qkv_proj": "interleaved_colwise"},  # query, value and key of each of 4 groups of heads
}
"""What takes the place of a rule of the model's own plan, and is no rule where it publishes none (before 5.24)."""

OF_USERS: set[str] = set()
"""Classes whose rules a user registered."""

WHOLE_BETWEEN_BLOCKS = {
    *("Inkling2TextModel", "Inkling2LoopTextModel"),
    *("BltLocalEncoder", "BltLocalDecoder", "XLMModel", "FlaubertModel"),
}
"""Classes that compute with the stream between their blocks: sequence parallelism gathers it after each block."""

WHOLE = {
    "AutoformerAttention",  # finds its delays by a mean over all heads
    "BigBirdAttention",  # takes another module for short sequences, which counts all heads
    "SpeechT5Attention",  # is handed features of positions, which all heads read, as its position_bias
    "PegasusXGlobalLocalAttention",  # computes with a width that it finds in a record of its sizes
}
"""Classes that no plan by names splits."""

READS_BIASES_IN_MASKS = {"BeitAttention"}
"""Attention modules to whose mask their block adds numbers of all heads; others are handed these by a name."""

MIXES_TOKENS = {"DogeAttention"}
"""Attention modules in which tokens meet beside transformers' registry of attention functions (a mask that is made of
values): context parallelism gives them the whole sequence."""

ATTENDS_WITHIN_TOKENS = {"Inkling2BlockAttentionResidual", "Inkling2LoopBlockAttentionResidual"}
"""Modules that call transformers' registry of attention functions over something else than tokens, a token's states
behind groups of blocks (from 5.24 on): context parallelism leaves them on rows."""

WHOLE_STREAM = {"DiffusionGemmaDecoderModel"}
"""Models whose blocks attend to another sequence beside their own: context parallelism leaves their stream whole."""


def register_tp_plan(class_name: str, rules: Mapping[str, str | ParallelStyle]) -> None:
    """Gives every model of a class a plan, or completes the one that it publishes.

    Args:
        class_name: of the model, of a module inside of it, or of a base class; a plan registered there is replaced.
        rules: name pattern inside of the class (``*`` stands for a number) to style name or torch ``ParallelStyle``.
    """
    ADDITIONS[class_name] = dict(rules)
    OF_USERS.add(class_name)
