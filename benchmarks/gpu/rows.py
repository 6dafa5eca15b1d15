"""What the ladder on one device measures: models by their published sizes, and cumulative steps."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from benchmarks._ladder import accumulated

MODELS: dict[str, dict[str, Any]] = {  # the sizes of each model's config.json on the hub
    "Llama-3.2-1B": dict(
        model_type="llama",
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=128_256,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    ),
    "Llama-3.1-8B": dict(
        model_type="llama",
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128_256,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    ),
    "Qwen3-8B": dict(
        model_type="qwen3",
        hidden_size=4096,
        intermediate_size=12_288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151_936,
        tie_word_embeddings=False,
    ),
    "Qwen3-30B-A3B": dict(
        model_type="qwen3_moe",
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        vocab_size=151_936,
        tie_word_embeddings=False,
    ),
}
SMALLEST = dict(  # what --smoke puts in their place
    hidden_size=32,
    intermediate_size=64,
    moe_intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=4,
    num_experts_per_tok=2,
    vocab_size=128,
)


ALL, ATTENTION = "all-linear", ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement.

    Attributes:
        model: of :data:`MODELS`.
        name: what this row adds to the one above it.
        length: tokens of a row.
        rows: of a batch.
        adapters: what adapters of rank 16 are beside, which then train alone; ``None``: all parameters train.
        fields: of ``FSDP2Config``, all that hold.
        experts: transformers' ``experts_implementation``.
        by_hand: a loop of plain PyTorch and transformers.
        target: tokens per second on one H200.
    """

    model: str
    name: str = ""
    length: int
    rows: int = 1
    adapters: str | Sequence[str] | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    experts: str | None = None
    by_hand: bool = False
    target: int | None = None

    @property
    def table(self) -> str:
        """Name the table of this row."""
        kinds = {None: "full", ALL: "LoRA", ATTENTION: "LoRA on attention"}
        return f"{self.model}, {kinds[self.adapters]}, {self.rows} x {self.length} tokens"  # type: ignore[index]

    @property
    def key(self) -> str:
        """Tell this row from all others."""
        return f"{self.table}, {self.name}"

    def config(self, smoke: bool) -> PreTrainedConfig:
        """Build the config of the model."""
        sizes = dict(MODELS[self.model])
        if smoke:
            sizes |= {name: value for name, value in SMALLEST.items() if name in sizes}
        return AutoConfig.for_model(**sizes, max_position_embeddings=2 * self.length, use_cache=False)

    def tokens(self, smoke: bool) -> int:
        """Count the tokens of a row."""
        return 32 if smoke else self.length

    def to_dict(self) -> dict[str, Any]:
        """Spell the row for another process."""
        return asdict(self)


CHUNKED = {"chunked_loss": 1024}
COMPILED = {**CHUNKED, "enable_compile": True}
FULL = {"activation_checkpointing": "full"}
BY_HAND = "a loop by hand, checkpointed"
RUNGS: dict[str, dict[str, Any]] = {
    BY_HAND: {},
    "Trainer, checkpointed": FULL,
    f"{BY_HAND}, again": {},
    "Trainer, checkpointed, again": {},  # a device that has become warm is slower
    "+ chunked loss": CHUNKED,
    "+ compiled blocks": {"enable_compile": True},
    "+ selective checkpointing": {"activation_checkpointing": "selective"},
    "+ float8": {"float8": "tensorwise"},
}


def ladder(model: str, length: int, adapters: str | None, targets: dict[str, int]) -> list[Row]:
    """Rows that add a lever each."""
    return [
        Row(
            model=model,
            name=name,
            length=length,
            adapters=adapters,
            fields=fields,
            by_hand=name.startswith(BY_HAND),
            target=targets.get(name),
        )
        for name, fields in accumulated(RUNGS).items()
        if not (adapters and ("float8" in fields or "again" in name))
    ]


ROWS: list[Row] = [  # the most valuable first: time may be over before the last
    *ladder("Llama-3.1-8B", 8192, None, {"+ compiled blocks": 8500, "+ float8": 10_900}),
    *ladder("Llama-3.1-8B", 4096, ALL, {"+ selective checkpointing": 14_000}),
    Row(
        model="Llama-3.1-8B",
        name="compiled, chunked loss, nothing recomputed",
        length=4096,
        adapters=ALL,
        fields=COMPILED,
        target=14_000,
    ),
    *(
        Row(
            model="Llama-3.1-8B",
            name=f"compiled, chunked loss, {name}",
            length=4096,
            rows=2,
            fields={"activation_checkpointing": mode, **COMPILED},
            target=9600,
        )
        for name, mode in (("checkpointed", "full"), ("selective checkpointing", "selective"))
    ),
    Row(  # where there is no memory for selective checkpointing
        model="Llama-3.1-8B",
        name="compiled, chunked loss, float8, checkpointed",
        length=8192,
        fields={**FULL, **COMPILED, "float8": "tensorwise"},
    ),
    Row(
        model="Qwen3-30B-A3B",
        name="chunked loss, compiled, nothing recomputed, experts grouped_mm",
        length=4096,
        adapters=ATTENTION,
        fields=COMPILED,
        experts="grouped_mm",
    ),
    *(
        Row(
            model="Qwen3-30B-A3B",
            name=f"{', '.join(['chunked loss', 'checkpointed', *more])}, experts {experts}",
            length=4096,
            adapters=adapters,
            fields={**FULL, **CHUNKED, **dict.fromkeys(more and ["enable_compile"], True)},
            experts=experts,
        )
        for adapters, experts, more in (
            (ATTENTION, "grouped_mm", []),
            (ATTENTION, "grouped_mm", ["compiled"]),
            (ATTENTION, "eager", []),
            (ATTENTION, "batched_mm", []),
            (ALL, "grouped_mm", []),
            (ALL, "grouped_mm", ["compiled"]),
        )
    ),
    *(  # beside `+ compiled blocks` of the first table
        Row(
            model="Llama-3.1-8B",
            name=f"compiled, {name}, checkpointed",
            length=8192,
            fields={**FULL, "enable_compile": True, **loss},
        )
        for name, loss in (("Liger's loss", {"loss_kernel": "liger"}), ("whole logits", {}))
    ),
    Row(
        model="Qwen3-8B", name="compiled, chunked loss, checkpointed", length=4096, rows=2, fields={**FULL, **COMPILED}
    ),
    Row(model="Llama-3.2-1B", name="compiled, chunked loss", length=4096, rows=2, fields=COMPILED),
]


def smallest(rows: Sequence[Row]) -> list[Row]:
    """Choose rows that have every lever, once: by hand, under the Trainer, all rungs, adapters, experts."""
    wanted = (BY_HAND, "Trainer, checkpointed", "+ float8", "grouped_mm")
    last = {part: row for part in wanted for row in rows if part in row.name}
    return list({row.key: row for row in last.values()}.values())
