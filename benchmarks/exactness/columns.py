"""What is compared: the columns of the tables, and which families each is for."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from transformers import CONFIG_MAPPING

from lightning_automodel.config import FSDP2Config
from tests.support.comparison import Schedule
from tests.support.families import causal_families, image_text_families, tiny_config
from tests.support.run_family import Run
from tests.support.sizes import SMALL

ONE = Schedule(steps=1, micro_batches=1, clip=None)
TWO = Schedule(steps=1, micro_batches=2, clip=None)
LONG = Schedule(steps=3, micro_batches=2, clip=0.5)
CHUNK = 7  # tokens; the last chunk of a batch is shorter

HYBRIDS = (
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "jamba",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "minimax",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
    "recurrent_gemma",
)
FOUR_RANKS = (
    "apertus",
    "cohere2",
    "deepseek_v3",
    "gemma2",
    "gemma3_text",
    "glm4_moe",
    "llama",
    "mixtral",
    "olmo2",
    "phi3",
    "qwen3",
    "qwen3_5_text",
    "qwen3_moe",
    "starcoder2",
)
CONTEXT = (
    "cohere2",
    "deepseek_v3",
    "doge",
    "gemma3_text",
    "gemma3n_text",
    "glm_moe_dsa",
    "gpt_oss",
    "hrm_text",
    "hy_v4",
    "inkling2_text",
    "lfm2_moe",
    "llama",
    "mistral",
    "nemotron_h",
    "qwen3_5_text",
    "qwen3_moe",
)
"""One of each kind of mixer, mask and stream."""
EXPERTS = (
    "aria_text",
    "deepseek_v3",
    "gpt_oss",
    "granitemoe",
    "lfm2_moe",
    "llama4_text",
    "minimax",
    "nemotron_h",
    "qwen3_5_moe_text",
)
"""One of each kind of experts and of the layers beside them."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of a table.

    Attributes:
        title: its heading.
        run: layout and schedule; ``None``: weights are compared, not numbers of a step.
        weights: what :class:`~tests.support.weights.Weights` calls them; empty: the initial ones.
        needs_plan: only for families that have a tensor-parallel plan, of their own or by the names of their layers.
        families: for which ones; ``None``: all.
    """

    title: str
    run: Run | None
    weights: str = ""
    needs_plan: bool = True
    families: Callable[[], list[str]] | None = None

    @property
    def world(self) -> int:
        """Number of ranks."""
        return 2 if self.run is None else self.run.world


def router_families() -> list[str]:
    """Causal families whose config has a switch for auxiliary losses of their routers."""
    return [name for name in causal_families() if {"output_router_logits"} <= _fields(CONFIG_MAPPING[name])]


def dropping_families() -> list[str]:
    """Causal families with a plan whose config has a field that drops or adds noise while a model trains."""
    return [name for name in causal_families() if _DROPPED.keys() & _fields(CONFIG_MAPPING[name])]


def expert_families() -> list[str]:
    """Families whose language model has several experts, in the order of :func:`all_families`."""
    return [name for name in all_families() if _has_experts(name)]


def _has_experts(family: str) -> bool:
    try:
        config = tiny_config(family).get_text_config()
    except Exception:  # what cannot be configured is in the main table, with the reason
        return False
    return any((getattr(config, name, None) or 1) > 1 for name in _COUNTS)


def all_families() -> list[str]:
    """Causal families with and without a plan, then those that read images."""
    return [*causal_families(), *causal_families(with_plan=False), *image_text_families()]


def _fields(config_class: type) -> set[str]:
    if dataclasses.is_dataclass(config_class):
        return {field.name for field in dataclasses.fields(config_class)}
    return set(inspect.signature(config_class).parameters)


_DROPPED = {name: 0.1 for name, value in SMALL.items() if isinstance(value, float) and value == 0} | {
    "router_jitter_noise": 0.1,
    "input_jitter_noise": 0.1,
}
_ROUTER = {"output_router_logits": True, "router_aux_loss_coef": 1.0}
_MESH = {"dp_shard": 2, "tp": 2}
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_MORE_EXPERTS = {
    **dict.fromkeys(_COUNTS, 8),
    **{"enable_moe_block": True, "top_k_experts": 2, "is_moe": True},
}
_OF_FEED_FORWARD = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "d_ff", "hidden_dim")
_OF_THREE = {name: 9 * value // 8 for name, value in SMALL.items() if name.endswith(_OF_FEED_FORWARD)} | {
    **{"dim_ff": 144, "intermediate_size_mlp": 144, "expert_ffn_hidden_size": 72},
}
"""Widths of feed-forwards that three ranks divide: packed ones must be."""
_SEQUENCE_AGAIN = FSDP2Config(sequence_parallel=True, activation_checkpointing=True)

MAIN: Mapping[str, Column] = {
    "tp": Column(title="tp=2", run=Run(sizes={"tp": 2}, schedule=ONE)),
    "accumulation": Column(title="tp=2, 2 micro-batches", run=Run(sizes={"tp": 2}, schedule=TWO)),
    "mesh": Column(title="dp_shard=2 x tp=2, 3 steps", run=Run(sizes=_MESH, schedule=LONG)),
    "sequence": Column(
        title="tp=2, sequence parallelism",
        run=Run(sizes={"tp": 2}, schedule=TWO, config=FSDP2Config(sequence_parallel=True), ragged=True),
    ),
    "chunked": Column(
        title="tp=2, chunked loss",
        run=Run(sizes={"tp": 2}, schedule=TWO, config=FSDP2Config(chunked_loss=CHUNK), ragged=True),
    ),
    "context": Column(title="cp=2, 3 steps", run=Run(sizes={"cp": 2}, schedule=LONG, ragged=True), needs_plan=False),
    "packed": Column(
        title="cp=2, packed documents", run=Run(sizes={"cp": 2}, schedule=TWO, packed=True), needs_plan=False
    ),
    "context_tp": Column(
        title="cp=2 x tp=2, sequence parallelism, 3 steps",
        run=Run(sizes={"cp": 2, "tp": 2}, schedule=LONG, config=FSDP2Config(sequence_parallel=True), ragged=True),
    ),
    "initial": Column(title="initial weights", run=None),
    "read": Column(title="weights read", run=None, weights="read", needs_plan=False),
    "written": Column(title="weights written", run=None, weights="written", needs_plan=False),
    "fsdp": Column(
        title="dp_shard=2",
        run=Run(sizes={"dp_shard": 2}, schedule=dataclasses.replace(LONG, steps=1)),
        needs_plan=False,
    ),
    "lora": Column(title="LoRA, tp=2", run=Run(sizes={"tp": 2}, schedule=TWO, adapter="all-linear")),
    "lora_mesh": Column(
        title="LoRA, dp_shard=2 x tp=2, 3 steps", run=Run(sizes=_MESH, schedule=LONG, adapter="all-linear")
    ),
    "lora_fsdp": Column(
        title="LoRA, dp_shard=2",
        run=Run(sizes={"dp_shard": 2}, schedule=dataclasses.replace(LONG, steps=1), adapter="all-linear"),
        needs_plan=False,
    ),
}
EXTRA: Mapping[str, Column] = {
    "context4": Column(
        title="cp=4, keys and values gathered",
        run=Run(sizes={"cp": 4}, schedule=TWO, config=FSDP2Config(cp_exchange="gather"), ragged=True),
        families=lambda: list(CONTEXT),
    ),
    "heads4": Column(
        title="cp=4, heads exchanged where attention works on rows",
        run=Run(sizes={"cp": 4}, schedule=TWO, config=FSDP2Config(cp_exchange="all_to_all"), ragged=True),
        families=lambda: list(CONTEXT),
    ),
    "tp4": Column(
        title="tp=4: twice as many ranks as key/value heads",
        run=Run(sizes={"tp": 4}, schedule=TWO),
        families=lambda: list(FOUR_RANKS),
    ),
    "uneven": Column(
        title="tp=3: heads that three ranks cannot divide",
        run=Run(sizes={"tp": 3}, schedule=TWO, changes=_OF_THREE),
    ),
    "uneven_mesh": Column(
        title="tp=3 with sequence parallelism, such heads: dp_shard=2, 3 steps",
        run=Run(
            sizes={"dp_shard": 2, "tp": 3},
            schedule=LONG,
            changes=_OF_THREE,
            config=FSDP2Config(sequence_parallel=True),
            ragged=True,
        ),
        families=lambda: list(FOUR_RANKS),
    ),
    "layers": Column(
        title="four layers of hybrid models: dp_shard=2 x tp=2",
        run=Run(sizes=_MESH, schedule=LONG, changes={"num_hidden_layers": 4}),
        families=lambda: list(HYBRIDS),
    ),
    "experts": Column(
        title="experts beside the dense layers (enable_moe_block): dp_shard=2 x tp=2",
        run=Run(sizes=_MESH, schedule=LONG, changes={"enable_moe_block": True, "top_k_experts": 2}),
        families=lambda: ["gemma4", "gemma4_text"],
    ),
    "ep": Column(
        title="expert parallelism: dp_shard=4, ep=2, 3 steps",
        run=Run(sizes={"dp_shard": 4, "ep": 2}, schedule=LONG, changes=_MORE_EXPERTS),
        families=expert_families,
        needs_plan=False,
    ),
    "ep_tp": Column(
        title="expert parallelism: dp_shard=2 x tp=2, ep=2, sequence parallelism, checkpointing, 3 steps",
        run=Run(sizes={**_MESH, "ep": 2}, schedule=LONG, changes=_MORE_EXPERTS, config=_SEQUENCE_AGAIN, ragged=True),
        families=expert_families,
    ),
    "ep4": Column(
        title="expert parallelism: dp_shard=4, ep=4, 3 steps",
        run=Run(sizes={"dp_shard": 4, "ep": 4}, schedule=LONG, changes=_MORE_EXPERTS),
        families=lambda: list(EXPERTS),
        needs_plan=False,
    ),
    "ep_hybrid": Column(
        title="expert parallelism: dp_replicate=2 x dp_shard=2, ep=2, 3 steps",
        run=Run(sizes={"dp_replicate": 2, "dp_shard": 2, "ep": 2}, schedule=LONG, changes=_MORE_EXPERTS),
        families=lambda: list(EXPERTS),
        needs_plan=False,
    ),
    "ep_context": Column(
        title="expert parallelism: dp_shard=2 x cp=2, ep=4, 3 steps",
        run=Run(sizes={"dp_shard": 2, "cp": 2, "ep": 4}, schedule=LONG, changes=_MORE_EXPERTS, ragged=True),
        families=lambda: list(EXPERTS),
        needs_plan=False,
    ),
    "router": Column(
        title="auxiliary losses of routers, with coefficient 1: dp_shard=2 x tp=2",
        run=Run(sizes=_MESH, schedule=LONG, changes=_ROUTER),
        families=router_families,
    ),
    "dropout": Column(
        title="dropout and jitter of 0.1 in every field: tp=2",
        run=Run(sizes={"tp": 2}, schedule=TWO, changes=_DROPPED),
        families=dropping_families,
    ),
    "dropout_sequence": Column(
        title="dropout and jitter of 0.1 in every field: tp=2, sequence parallelism",
        run=Run(
            sizes={"tp": 2},
            schedule=TWO,
            changes=_DROPPED,
            config=FSDP2Config(sequence_parallel=True),
            ragged=True,
        ),
        families=dropping_families,
    ),
}
PEERS: Mapping[str, Column] = {
    "transformers": Column(title="one micro-batch", run=Run(sizes={"tp": 2}, schedule=ONE, by_transformers=True)),
    "transformers_accumulation": Column(
        title="two micro-batches", run=Run(sizes={"tp": 2}, schedule=TWO, by_transformers=True)
    ),
}
"""Other tools, on a page of their own: :mod:`benchmarks.peers_exactness`."""
COLUMNS: Mapping[str, Column] = {**MAIN, **EXTRA, **PEERS}
