"""What is compared: the columns of the tables, and which families each is for."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from transformers import CONFIG_MAPPING

from lightning_automodel.config import FSDP2Config
from tests.support.comparison import Schedule
from tests.support.families import causal_families, image_text_families
from tests.support.run_family import Run

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
    "zamba2",
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


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of a table.

    Attributes:
        title: its heading.
        run: layout and schedule; ``None``: the initial weights.
        needs_plan: only for families that publish a tensor-parallel plan.
        families: for which ones; ``None``: all.
    """

    title: str
    run: Run | None
    needs_plan: bool = True
    families: Callable[[], list[str]] | None = None

    @property
    def world(self) -> int:
        """Number of ranks."""
        return 2 if self.run is None else self.run.world


def router_families() -> list[str]:
    """Causal families whose config has a switch for auxiliary losses of their routers."""
    return [name for name in causal_families() if {"output_router_logits"} <= _fields(CONFIG_MAPPING[name])]


def all_families() -> list[str]:
    """Causal families with and without a plan, then those that read images."""
    return [*causal_families(), *causal_families(with_plan=False), *image_text_families()]


def _fields(config_class: type) -> set[str]:
    if dataclasses.is_dataclass(config_class):
        return {field.name for field in dataclasses.fields(config_class)}
    return set(inspect.signature(config_class).parameters)


_ROUTER = {"output_router_logits": True, "router_aux_loss_coef": 1.0}
_MESH = {"dp_shard": 2, "tp": 2}

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
    "initial": Column(title="initial weights", run=None),
    "fsdp": Column(
        title="dp_shard=2",
        run=Run(sizes={"dp_shard": 2}, schedule=dataclasses.replace(LONG, steps=1)),
        needs_plan=False,
    ),
}
EXTRA: Mapping[str, Column] = {
    "tp4": Column(
        title="tp=4: twice as many ranks as key/value heads",
        run=Run(sizes={"tp": 4}, schedule=TWO),
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
    "router": Column(
        title="auxiliary losses of routers, with coefficient 1: dp_shard=2 x tp=2",
        run=Run(sizes=_MESH, schedule=LONG, changes=_ROUTER),
        families=router_families,
    ),
}
COLUMNS: Mapping[str, Column] = {**MAIN, **EXTRA}
