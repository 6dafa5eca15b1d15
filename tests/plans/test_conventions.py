"""Plans by the names of layers: what they find, what they leave whole, and that they are exact on the user's way."""

import copy
import math
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
    WhisperConfig,
    WhisperForConditionalGeneration,
)
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from lightning_automodel import FSDP2Config, FSDP2TPStrategy
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.plans import derive_layout, select_plan
from lightning_automodel.plans.published import published_plan
from lightning_automodel.plans.selection import has_rules, known_rules
from lightning_automodel.testing.pool import Pool, RankFailed
from tests.plans.support import BOUND, SCHEDULE, build_opt, build_reformer
from tests.plans.test_custom_plans import changed_bert, documented
from tests.support.comparison import compare
from tests.support.families import tiny_model
from tests.support.marks import with_long
from tests.support.training import whole

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
DRY: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def layers_of(model: nn.Module) -> dict[str, str]:
    """Rules by the last two names of a layer in its block."""
    rules = {rule.rpartition("*.")[2]: style for rule, style in known_rules(model).items()}
    return {".".join(name.split(".")[-2:]): style for name, style in rules.items()}


def test_the_names_of_opt_tell_the_documented_plan() -> None:
    assert known_rules(build_opt()) == {**documented(), "lm_head": "colwise_gather_output"}


@pytest.mark.parametrize(
    ("family", "split", "left"),
    [
        ("bert", {"self.query": "colwise", "output.dense": "rowwise", "intermediate.dense": "colwise"}, ""),
        ("bloom", {"self_attention.query_key_value": "interleaved_colwise", "mlp.dense_h_to_4h": "colwise"}, ""),
        ("lfm2", {"feed_forward.w1": "colwise", "feed_forward.w3": "colwise", "feed_forward.w2": "rowwise"}, "conv"),
        ("mpt", {"attn.Wqkv": "packed_qkv_colwise", "attn.out_proj": "rowwise"}, ""),
        ("persimmon", {"self_attn.query_key_value": "interleaved_colwise"}, ""),
        ("moshi", {"mlp.fc1": "packed_colwise", "mlp.fc2": "rowwise"}, ""),
        ("xmod", {"self.query": "colwise", "intermediate.dense": "colwise_gather_output"}, ""),
        ("hunyuan_v1_dense", {"self_attn.q_proj": "colwise", "mlp.down_proj": "rowwise"}, ""),  # its plan: the head
        ("gpt2", {"attn.c_attn": "packed_qkv_colwise", "attn.c_proj": "rowwise", "mlp.c_fc": "colwise"}, ""),
        ("mixtral", {}, "gate."),  # a router, which does not write the stream
    ],
)
def test_what_is_split_and_what_stays_whole(family: str, split: dict[str, str], left: str) -> None:
    model = tiny_model(family)
    found = layers_of(model)
    assert split.items() <= found.items()
    assert not [name for name in known_rules(model) if left and left in name]


@pytest.mark.parametrize(
    ("family", "changes", "split", "gathered"),
    [
        ("stablelm", {"qk_layernorm": True}, "mlp.up_proj", "self_attn.q_proj"),  # a list of norms, one for each head
        ("prophetnet", {}, "feed_forward.intermediate", "self_attn.query_proj"),  # positions; widths of what came in
        ("trocr", {}, "fc1", "self_attn.q_proj"),  # reshape to the width of the input
        ("diffllama", {}, "mlp.up_proj", "self_attn.q_proj"),  # parameters for pairs of heads
        ("gpt_bigcode", {"multi_query": True}, "mlp.c_fc", "attn.c_attn"),  # one key and value behind all queries
        ("bitnet", {}, "", "mlp.up_proj"),  # a norm across the features between two layers
        ("kimi_linear", {}, "", "self_attn.q_proj"),  # beside a plan of its own: convolutions over all features
    ],
)
def test_what_needs_all_features_gathers_them(family: str, changes: dict[str, Any], split: str, gathered: str) -> None:
    found = layers_of(tiny_model(family, **changes))
    assert not split or found[split] == "colwise"
    assert found[gathered] == "colwise_gather_output"


@pytest.mark.parametrize(
    ("family", "added"),
    [
        ("granitemoe", {"self_attn.q_proj": "colwise", "self_attn.o_proj": "rowwise"}),
        ("deepseek_v3", {"self_attn.kv_b_proj": "colwise", "self_attn.kv_a_proj_with_mqa": "mla_kv_a_proj"}),
        ("afmoe", {"self_attn.gate_proj": "colwise", "mlp.up_proj": "colwise", "shared_experts.up_proj": "colwise"}),
        ("flint", {"self_attn.sinks": "colwise", "self_attn.k_proj": "colwise"}),
        ("gpt_oss", {"self_attn.sinks": "colwise", "self_attn.v_proj": "colwise"}),
        ("minimax_m3_vl_text", {"shared_experts.gate_up_proj": "packed_colwise"}),
        ("granitemoehybrid", {"shared_mlp.input_linear": "packed_colwise", "shared_mlp.output_linear": "rowwise"}),
        ("nemotron_h", {"mixer.q_proj": "colwise", "mixer.up_proj": "colwise", "shared_experts.up_proj": "colwise"}),
    ],
)
def test_a_plan_of_experts_is_completed(family: str, added: dict[str, str]) -> None:
    model = tiny_model(family)
    assert added.items() <= layers_of(model).items()
    assert all(
        known_rules(model)[rule] == style for rule, style in (model.tp_plan or {}).items() if "lm_head" not in rule
    )
    assert derive_layout(model, select_plan(model), 2).measured  # docs/families.md


@pytest.mark.parametrize(
    ("family", "changes", "added"),
    [
        ("gpt_oss", {}, {"model.embed_tokens": "embedding_rowwise"}),
        ("gpt_oss", {"tie_word_embeddings": True}, {}),  # the head's rule is about its matrix, too
        ("nemotron_h", {}, {"lm_head": "colwise_gather_output"}),
        ("chameleon", {}, {"model.embed_tokens": "embedding_rowwise", "lm_head": "replicate"}),  # it writes into logits
    ],
)
def test_ends_that_a_plan_leaves_out_are_split(family: str, changes: dict[str, Any], added: dict[str, str]) -> None:
    model = tiny_model(family, **changes)
    ends = {rule: style for rule, style in known_rules(model).items() if "*" not in rule}
    published = published_plan(model)
    # transformers 5.24 publishes one of them.
    assert {rule: style for rule, style in ends.items() if rule not in published or rule in added} == added


def test_towers_that_a_plan_leaves_out_stay_whole() -> None:
    rules = known_rules(tiny_model("llava"))
    assert not [rule for rule in rules if "vision_tower" in rule]
    assert any(rule.endswith("self_attn.q_proj") for rule in rules)


def test_heads_in_groups_alternate_with_their_keys_and_values() -> None:
    model = tiny_model("falcon", new_decoder_architecture=True, num_kv_heads=2)
    assert layers_of(model)["self_attention.query_key_value"] == "interleaved_colwise"
    attributes = derive_layout(model, select_plan(model), 2).attributes["transformer.h.0.self_attention"]
    assert attributes == {"num_heads": 2, "num_kv_heads": 1}


def test_a_plan_of_the_users_for_another_model_leaves_an_encoder_whole() -> None:
    encoder, plan = tiny_model("bert").base_model, {"model.layers.*.mlp.up_proj": "colwise"}
    assert has_rules(encoder, None)
    assert has_rules(encoder, {"extends": "model", **plan})
    assert has_rules(encoder, {"encoder.layer.*.intermediate.dense": "colwise_gather_output"})
    assert not has_rules(encoder, plan)  # it replaces the names, and matches nothing


def test_a_plan_names_each_layer_once_in_wildcards() -> None:
    rules = known_rules(tiny_model("bert"))
    assert "bert.encoder.layer.*.intermediate.dense" in rules
    assert not [rule for rule in rules if any(part.isdigit() for part in rule.split("."))]


def test_models_without_such_names_and_of_no_library_have_no_rules() -> None:
    assert known_rules(build_reformer()) == {}
    layer = nn.ModuleDict({"fc1": nn.Linear(4, 8), "fc2": nn.Linear(8, 4)})
    assert known_rules(nn.ModuleList([layer, copy.deepcopy(layer)])) == {}


def test_ranks_hold_less() -> None:
    model = build_opt()
    layout = derive_layout(model, select_plan(model), 2)
    matrices = [n for n, p in model.named_parameters() if p.ndim == 2 and "embed_positions" not in n]
    assert [n for n in matrices if layout.parameters[n].placement == Replicate()] == []
    assert not layout.measured  # the first forward pass proves it


class EmptyExperts(GptOssExperts):
    """A user's, which computes what it inherits."""


class CountingExperts(GptOssExperts):
    """A user's, which computes with the width of what a rank has."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(*args, **kwargs) * self.gate_up_proj.shape[-1]


def with_experts(kind: type) -> nn.Module:
    model: Any = tiny_model("gpt_oss", experts="eager")
    for layer in model.model.layers:
        layer.mlp.experts.__class__ = kind
    return model


def error_of_experts(kind: type) -> Any:
    """Runs on each rank."""
    return compare(partial(with_experts, kind), {"tp": 2}, 2, SCHEDULE).largest


def test_experts_of_users_are_tried(pool2: Pool) -> None:
    for error, where in pool2.run(error_of_experts, EmptyExperts):
        assert error <= BOUND, where
    with pytest.raises(RankFailed, match=r"layers.0.mlp \(GptOssMLP\) gives other numbers with parts of its weights"):
        pool2.run(error_of_experts, CountingExperts)


# ---- on ranks --------------------------------------------------------------------------------------------------------

FAMILIES = (
    *("bert", "bloom", "falcon", "falcon_h1", "gpt2", "mpt", "mvp"),
    *("openai-gpt", "opt", "persimmon", "prophetnet", "xlm", "zamba"),
)
"""One of each rule: residuals, attributes of widths, fused, turned and shared layers, sums in place, lists, what stays
whole.
"""
ON_FOUR_RANKS = {"some": ("bert", "gpt2", "mpt", "xlm", "zamba"), "all": FAMILIES}
"""Layers that others read, too, matrices that are stored in another way, blocks that see all tokens."""


def errors(sizes: dict[str, int], fields: dict[str, Any], families: tuple[str, ...] = FAMILIES) -> dict[str, Any]:
    """Runs on each rank: the largest error of each family."""
    world = torch.distributed.get_world_size()
    config = FSDP2Config(**fields)
    found = {name: compare(partial(tiny_model, name), sizes, world, SCHEDULE, config).largest for name in families}
    return {name: error for name, error in found.items() if error[0] > BOUND}


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"sequence_parallel": True}], ids=["", "sequence_parallel"])
def test_families_are_exact(fields: dict[str, Any], pool2: Pool) -> None:
    assert pool2.run(errors, {"tp": 2}, fields, timeout=300) == [{}, {}]


@pytest.mark.slow
@pytest.mark.parametrize("which", with_long(ON_FOUR_RANKS, "all"))
def test_families_are_exact_on_data_ranks(which: str, pool4: Pool) -> None:
    assert pool4.run(errors, {"dp_shard": 2, "tp": 2}, {}, ON_FOUR_RANKS[which], timeout=300) == [{}] * 4


def split_changed() -> None:
    """Runs on each rank."""
    model = changed_bert()
    ids = torch.arange(3, 15)[None]
    parallelize(model, build_mesh(resolve_sizes(2, tp=2), "cpu"))(ids, labels=ids)


def test_names_are_no_proof(pool2: Pool) -> None:
    with pytest.raises(RankFailed, match=r"layer\.0\.intermediate \(BertIntermediate\) gives other numbers with parts"):
        pool2.run(split_changed)


@pytest.mark.slow
@pytest.mark.parametrize("which", with_long(ON_FOUR_RANKS, "all"))
def test_on_a_cut_sequence(which: str, pool4: Pool) -> None:
    """Of some of them blocks see all tokens, so that the ranks of tp must not cut these, too."""
    fields = {"sequence_parallel": True}
    assert pool4.run(errors, {"cp": 2, "tp": 2}, fields, ON_FOUR_RANKS[which], timeout=300) == [{}] * 4


# ---- from files, with a Trainer --------------------------------------------------------------------------------------


def classifier() -> tuple[PreTrainedModel, dict[str, Tensor]]:
    model = BertForSequenceClassification(BertConfig(**SIZES, **DRY, vocab_size=61, num_labels=3))
    return model, {"input_ids": ids(4, 12), "labels": torch.tensor([0, 2, 1, 0])}


def encoder_decoder() -> tuple[PreTrainedModel, dict[str, Tensor]]:
    config = T5Config(vocab_size=61, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0)
    config.decoder_start_token_id = 0
    return T5ForConditionalGeneration(config), {"input_ids": ids(4, 12), "labels": ids(4, 9)}


def images() -> tuple[PreTrainedModel, dict[str, Tensor]]:
    model = ViTForImageClassification(ViTConfig(**SIZES, **DRY, image_size=16, patch_size=8, num_labels=3))
    return model, {"pixel_values": draw(4, 3, 16, 16), "labels": torch.tensor([0, 2, 1, 0])}


def speech() -> tuple[PreTrainedModel, dict[str, Tensor]]:
    widths = {f"{part}_{name}": value for part in ("encoder", "decoder") for name, value in _WHISPER.items()}
    config = WhisperConfig(
        **widths,
        d_model=32,
        vocab_size=61,
        num_mel_bins=8,
        max_source_positions=10,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 1),
    )
    return WhisperForConditionalGeneration(config), {"input_features": draw(4, 8, 20), "labels": ids(4, 9)}


_WHISPER = {"layers": 2, "attention_heads": 4, "ffn_dim": 64}
TASKS = {f.__name__: f for f in (classifier, encoder_decoder, images, speech)}


def ids(*shape: int) -> Tensor:
    return torch.randint(3, 61, shape, generator=torch.Generator().manual_seed(0))


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


class FineTuning(L.LightningModule):
    """Steps of a saved model; each micro-batch is a row."""

    def __init__(self, task: str, directory: Path) -> None:
        super().__init__()
        self.task, self.directory = task, directory

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            kind = type(TASKS[self.task]()[0])
            self.model = kind.from_pretrained(self.directory, attn_implementation="eager")

    def train_dataloader(self) -> Any:
        _, batch = TASKS[self.task]()
        return torch.utils.data.DataLoader([{k: v[i] for k, v in batch.items()} for i in range(4)], batch_size=1)

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(task: str, directory: Path, sizes: dict[str, int] | None) -> tuple[dict[str, Tensor], int]:
    """Runs on each rank, or in this process: weights after two epochs of an optimizer step, and the rank's elements."""
    world = 1 if sizes is None else math.prod(sizes.values())
    rows = 4 // (sizes or {}).get("dp_shard", 1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world,
        strategy="auto" if sizes is None else FSDP2TPStrategy(**sizes),
        max_epochs=2,
        accumulate_grad_batches=rows,
        gradient_clip_val=0.5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = FineTuning(task, directory)
    trainer.fit(module)
    held = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in module.parameters())
    return {name: whole(p).detach() for name, p in module.named_parameters()}, held


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_one_line_trains_it(task: str, tmp_path: Path, pool2: Pool, pool4: Pool) -> None:
    torch.manual_seed(0)
    TASKS[task]()[0].save_pretrained(tmp_path)
    expected, elements = trained(task, tmp_path, None)
    before = dict(TASKS[task]()[0].from_pretrained(tmp_path).named_parameters())
    for pool, sizes in ((pool2, {"tp": 2}), (pool4, {"tp": 2, "dp_shard": 2})):
        for found, held in pool.run(trained, task, tmp_path, sizes, trainer=True, timeout=120):
            assert held < 0.8 * elements
            for name, value in expected.items():
                change = (value - before[name.removeprefix("model.")]).norm()
                torch.testing.assert_close(found[name], value, rtol=0, atol=float(1e-3 * change) + 1e-7, msg=name)
