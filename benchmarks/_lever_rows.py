"""The rows of benchmarks.levers: which levers, on which devices, when to use them, and ladders of some."""

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LlamaConfig


@dataclass(frozen=True, kw_only=True)
class Lever:
    """A row of the table.

    Attributes:
        fields: of ``FSDP2Config``, besides those of all rows.
        when: when to use it, in two sentences.
        micro_batches: of a step.
        ranks: with fewer it does nothing.
        devices: on which it is measured.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    when: str = ""
    micro_batches: int = 1
    ranks: int = 1
    devices: tuple[str, ...] = ("cpu", "cuda")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is trained on a kind of device.

    Attributes:
        width: of the residual stream.
        vocabulary: entries.
        tokens: of the one row of a batch.
        three_blocks: a minimum of parameters that three blocks have, and two have not.
        fields: of all rows.
    """

    width: int
    vocabulary: int
    tokens: int
    three_blocks: int
    fields: dict[str, Any] = field(default_factory=dict)


BF16 = {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SETTINGS = {
    "cpu": Setting(width=256, vocabulary=8192, tokens=512, three_blocks=2_000_000),
    "cuda": Setting(width=2048, vocabulary=32_000, tokens=4096, three_blocks=120_000_000, fields={"mp_policy": BF16}),
}
HERE = SETTINGS[DEVICE]
RANKS = min(2, torch.cuda.device_count()) if DEVICE == "cuda" else 2


def model_config() -> LlamaConfig:
    return LlamaConfig(
        hidden_size=HERE.width,
        intermediate_size=HERE.width * 11 // 4,
        num_hidden_layers=6,
        num_attention_heads=HERE.width // (32 if DEVICE == "cpu" else 128),
        num_key_value_heads=HERE.width // (64 if DEVICE == "cpu" else 256),
        vocab_size=HERE.vocabulary,
        use_cache=False,
    )


LEVERS: dict[str, dict[str, Lever]] = {
    "tp": {
        "default": Lever(),
        "sequence_parallel": Lever(
            fields={"sequence_parallel": True},
            ranks=2,
            when="Turn it on whenever tp is greater than 1 and sequences are long: what lies between the layers "
            "takes 1/tp of its memory. It moves as many bytes as without, in twice as many collectives.",
        ),
        "activation_checkpointing full": Lever(
            fields={"activation_checkpointing": "full"},
            when="Use it when activations do not fit: a block keeps its input only, and its forward pass runs twice."
            " With tp it also repeats one of the two sums of a block.",
        ),
        "activation_checkpointing selective": Lever(
            fields={"activation_checkpointing": "selective"},
            when="Use it when full checkpointing is more than you need: attention and every second matrix product "
            "are not computed again. A list such as ['attention', 'matmul'] says exactly what is kept.",
        ),
        "activation_checkpointing submodule": Lever(
            fields={"activation_checkpointing": "submodule"},
            when="Attention, feed-forward and norms are computed again one by one, so the peak of the backward pass "
            "is that of one of them. Use it when a whole block at a time is too much.",
        ),
        "full, with sequence_parallel": Lever(
            fields={"activation_checkpointing": "full", "sequence_parallel": True},
            ranks=2,
            when="The least memory for activations: what a block keeps is cut over tp as well. The way to train long"
            " sequences.",
        ),
        "chunked_loss": Lever(
            fields={"chunked_loss": HERE.tokens // 4},
            when="Use it for large vocabularies: logits exist for one chunk of tokens at a time. It is often the "
            "first lever to turn, see docs/loss_memory.md.",
        ),
        "mp_policy bf16": Lever(
            fields={"mp_policy": BF16},
            devices=("cpu",),  # on GPUs it is the default of this table
            when="The usual precision of training on GPUs, and what Trainer(precision='bf16-mixed') sets: parameters"
            " are stored in float32, and gathered and used in bfloat16. On CPUs without bfloat16 units it is "
            "slower.",
        ),
        "autocast_dtype, float32 stream": Lever(
            fields={"mp_policy": {**BF16, "output_dtype": "float32"}, "autocast_dtype": "bfloat16"},
            when="Use it when bfloat16 loses too much in the residual sums of deep models: these stay in float32, "
            "and matrix products in bfloat16. It costs memory for the stream, and a cast per operation.",
        ),
        "enable_compile": Lever(
            fields={"enable_compile": True},
            when="Turn it on for long runs: blocks that are alike are compiled once, in the first step, and fused. "
            "Not worth it for a few steps, or for batches whose kind changes all the time.",
        ),
        "offload_policy": Lever(
            fields={"offload_policy": True},
            when="Use it when parameters and the states of the optimizer do not fit: they wait on the host, and the "
            "optimizer steps there. Each gather then crosses the bus, so it is the last lever to turn.",
            devices=("cuda",),
        ),
        "activation_offload": Lever(
            fields={"activation_checkpointing": "full", "activation_offload": True},
            when="Use it with full checkpointing when even the inputs of blocks do not fit: they wait on the host. "
            "They are copied in the stream that computes, there and back, so a step takes longer by what the bus needs "
            "for them.",
            devices=("cuda",),
        ),
        "float8": Lever(
            fields={"float8": "tensorwise", "enable_compile": True},
            when="Use it with enable_compile on GPUs from Ada and Hopper on, for models with large matrices: "
            "docs/precision.md. Numbers differ from bfloat16 by what float8 resolves.",
            devices=("cuda",),
        ),
        "enable_async_tensor_parallel": Lever(  # last of those that are measured: it sets a switch of the compiler
            fields={"enable_async_tensor_parallel": True, "sequence_parallel": True, "enable_compile": True},
            when="Use it with enable_compile on GPUs that are linked: what sequence parallelism, which it turns on, "
            "communicates runs beside the matrix products. It needs large batches to win.",
            ranks=2,
            devices=("cuda",),
        ),
        "patch_is_packed_sequence": Lever(
            when="Use it when rows are single documents: transformers do not look for packed ones, for which they wait "
            "for the device in every forward pass, and in every layer of flash attention. Wrong for packed rows.",
            devices=(),  # on CPU nothing waits
        ),
    },
    "dp_shard": {
        "default": Lever(),
        "reshard_after_forward False": Lever(
            fields={"reshard_after_forward": False},
            when="Use it when parameters fit gathered: the backward pass does not gather them again. The opposite, "
            "True, also frees the last block, which is needed first in the backward pass.",
        ),
        "enable_fsdp2_prefetch False": Lever(
            fields={"enable_fsdp2_prefetch": False},
            when="Leave it on: the next blocks are gathered while one computes. Off, FSDP2 gathers one block ahead "
            "in the backward pass only, which needs the least memory.",
        ),
        "prefetch depths 2 and 3": Lever(
            fields={"fsdp2_forward_prefetch_depth": 2, "fsdp2_backward_prefetch_depth": 3},
            when="Raise them when a profile shows that compute waits for gathers. Each step is one more gathered "
            "block in memory.",
        ),
        "fsdp2_min_num_params, units of 3 blocks": Lever(
            fields={"fsdp2_min_num_params": HERE.three_blocks},
            when="Use it for models of many small blocks, and for many ranks, where gathers are all latency: several "
            "blocks share one (12 of 48 blocks of 13 thousand parameters each: 0.49 of the time; 12 of 24 of 0.2 "
            "million: 0.84). Their parameters are whole in memory together, so a unit should stay small beside the "
            "activations.",
        ),
        "two micro-batches": Lever(
            micro_batches=2,
            when="With accumulation gradients are reduced once per step, and unreduced gradients of the whole model "
            "wait on every rank. The next row is to be compared with this one.",
        ),
        "two micro-batches, defer_fsdp_grad_sync False": Lever(
            fields={"defer_fsdp_grad_sync": False},
            micro_batches=2,
            when="Use it when unreduced gradients do not fit: they are reduced at every micro-batch, and a rank "
            "keeps its own part. It costs one reduction more per micro-batch.",
        ),
    },
}


LADDERS: dict[str, dict[str, Lever]] = {  # fields that a row adds to those above it
    "tp": {
        f"tp={RANKS}": Lever(),
        "+ bf16": Lever(fields={"mp_policy": BF16}, devices=("cpu",)),  # on GPUs all rows compute in it
        "+ sequence_parallel": Lever(fields={"sequence_parallel": True}, ranks=2),
        "+ chunked_loss": Lever(fields={"chunked_loss": HERE.tokens // 4}),
        "+ activation_checkpointing": Lever(fields={"activation_checkpointing": "full"}),
        "+ enable_compile": Lever(fields={"enable_compile": True}, devices=("cuda",)),  # not where memory is watched
    },
    "dp_shard": {
        f"dp_shard={RANKS}": Lever(),
        "+ bf16": Lever(fields={"mp_policy": BF16}, devices=("cpu",)),
        "+ chunked_loss": Lever(fields={"chunked_loss": HERE.tokens // 4}),
        "+ activation_checkpointing": Lever(fields={"activation_checkpointing": "full"}),
        "+ fsdp2_min_num_params": Lever(fields={"fsdp2_min_num_params": HERE.three_blocks}),
        "+ enable_compile": Lever(fields={"enable_compile": True}, devices=("cuda",)),
    },
}
