"""Attention that computes with numbers for each head beside the stream: biases of positions, learned or not.

A table in the first layer, from which the others are handed its biases; in every layer; or none: the model makes them.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    LayoutLMv3Config,
    LayoutLMv3ForTokenClassification,
    LongT5Config,
    LongT5ForConditionalGeneration,
    MPNetConfig,
    MPNetForMaskedLM,
    MptConfig,
    MptForCausalLM,
    Pix2StructTextConfig,
    Pix2StructTextModel,
    PvtConfig,
    PvtForImageClassification,
    SegformerConfig,
    SegformerForImageClassification,
    SpeechT5Config,
    SpeechT5ForTextToSpeech,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    T5ForTokenClassification,
    UdopConfig,
    UdopForConditionalGeneration,
    UMT5Config,
    UMT5ForConditionalGeneration,
)

from lightning_automodel import FSDP2Config
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.plans import derive_layout, select_plan
from lightning_automodel.plans.selection import known_rules
from lightning_automodel.testing.pool import Pool
from tests.plans.support import BOUND, SCHEDULE
from tests.support.comparison import compare
from tests.support.families import tiny_model
from tests.support.marks import with_long

T5: dict[str, Any] = {
    **{"vocab_size": 128, "d_model": 48, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_heads": 4},
    **{"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20},
    **{"dropout_rate": 0.0, "decoder_start_token_id": 0},
}
SIZES: dict[str, Any] = {"vocab_size": 128, "hidden_size": 32, "hidden_dropout": 0.0, "attention_dropout": 0.0}


def drawn(make: Any, config: Any, attention: str = "eager") -> nn.Module:
    """A model whose biases count."""
    torch.manual_seed(0)
    config.use_cache = False
    model = make._from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim <= 1 or "relative_attention_bias" in name:
                parameter.add_(torch.randn_like(parameter) * (0.05 if parameter.ndim <= 1 else 1))
    return model


def t5(kind: Any = T5ForConditionalGeneration, config: Any = T5Config, attention: str = "eager", **fields: Any) -> Any:
    return drawn(kind, config(**T5 | fields), attention)


def longt5(attention: str) -> nn.Module:
    fields: dict[str, Any] = {"encoder_attention_type": attention, "local_radius": 3, "global_block_size": 4}
    return t5(LongT5ForConditionalGeneration, LongT5Config, **fields)


def switch() -> nn.Module:
    experts: dict[str, Any] = {"num_experts": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
    experts |= {"num_decoder_layers": 2, "router_jitter_noise": 0.0}
    return t5(SwitchTransformersForConditionalGeneration, SwitchTransformersConfig, **experts, num_layers=2)


def mpnet() -> nn.Module:
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    dry: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return drawn(MPNetForMaskedLM, MPNetConfig(vocab_size=128, intermediate_size=64, **sizes, **dry))


def layoutlmv3() -> nn.Module:
    """The encoder makes biases of all heads, of places in the text and on the page."""
    dry: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_labels": 128}
    boxes: dict[str, Any] = {"coordinate_size": 6, "shape_size": 4, "visual_embed": False}
    config = LayoutLMv3Config(vocab_size=128, intermediate_size=64, **sizes, **boxes, **dry)
    return drawn(LayoutLMv3ForTokenClassification, config)


def bloom() -> nn.Module:
    return drawn(BloomForCausalLM, BloomConfig(**SIZES, n_layer=2, n_head=4))


def falcon(alibi: bool) -> nn.Module:
    fields: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "multi_query": False}
    return drawn(FalconForCausalLM, FalconConfig(**SIZES, **fields, parallel_attn=False, alibi=alibi))


def mpt() -> nn.Module:
    return drawn(MptForCausalLM, MptConfig(vocab_size=128, d_model=32, n_layers=2, n_heads=4, max_seq_len=64))


def pix2struct() -> nn.Module:
    sizes: dict[str, Any] = {"vocab_size": 128, "hidden_size": 32, "d_kv": 8, "d_ff": 64}
    others: dict[str, Any] = {"is_decoder": True, "dropout_rate": 0.0, "initializer_range": 0.02}
    return drawn(Pix2StructTextModel, Pix2StructTextConfig(**sizes, **others, num_layers=2, num_heads=4))


class Boxed(UdopForConditionalGeneration):
    """Reads text of which every token has the same box."""

    def forward(self, input_ids: Any, **others: Any) -> Any:
        bbox = torch.tensor([0.1, 0.2, 0.3, 0.4]).expand(*input_ids.shape, 4)
        return super().forward(input_ids=input_ids, bbox=bbox, **others)


def udop() -> nn.Module:
    """The stack makes biases of all heads, of a table that the first attention has, too."""
    buckets: dict[str, Any] = {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128}
    return t5(Boxed, UdopConfig, **buckets, num_decoder_layers=2, image_size=32, patch_size=8)


class Masked(T5ForTokenClassification):
    """Attends by a mask of its own for each head."""

    def forward(self, input_ids: Any, **others: Any) -> Any:
        draw = torch.Generator().manual_seed(1)
        mask = torch.randn(4, input_ids.shape[1], input_ids.shape[1], generator=draw).expand(len(input_ids), -1, -1, -1)
        return super().forward(input_ids=input_ids, attention_mask=mask, **others)


def lora(**fields: Any) -> nn.Module:
    """In float64: low rank cancels in float32."""
    torch.manual_seed(0)
    config = LoraConfig(target_modules=["q", "v", "o"], r=2, init_lora_weights=False)
    return get_peft_model(t5(**fields), config).double()


def checkpointing() -> nn.Module:
    """Biases of zeros, of attention to the encoder, are then made to have gradients."""
    model = t5()
    model.gradient_checkpointing_enable()
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "t5": t5,
    "t5 that checkpoints": checkpointing,
    "t5 that drops": partial(t5, dropout_rate=0.2),
    "gated t5 that drops in a kernel": partial(
        t5, attention="sdpa", feed_forward_proj="gated-gelu", tie_word_embeddings=False, dropout_rate=0.2
    ),
    "umt5": partial(t5, UMT5ForConditionalGeneration, UMT5Config),
    "longt5, local": partial(longt5, "local"),
    "longt5, transient global": partial(longt5, "transient-global"),
    "switch": switch,
    "udop": udop,
    "masks of heads": partial(t5, Masked, num_labels=128),
    "mpnet": mpnet,
    "layoutlmv3": layoutlmv3,
    "bloom": bloom,
    "falcon with alibi": partial(falcon, alibi=True),
    "falcon": partial(falcon, alibi=False),
    "mpt": mpt,
    "pix2struct": pix2struct,
    "lora": lora,
    "lora that drops": partial(lora, dropout_rate=0.2),
}
FEW = ("t5 that drops", "bloom", "mpt")
ONE_OF_EACH = (*FEW, "longt5, transient global", "mpnet", "layoutlmv3", "udop", "masks of heads")


def errors(sizes: dict[str, int], names: list[str], fields: dict[str, Any]) -> dict[str, Any]:
    """Runs on each rank: the largest error of each model that has one."""
    world = torch.distributed.get_world_size()
    found = {n: compare(MODELS[n], sizes, world, SCHEDULE, FSDP2Config(**fields)).largest for n in names}
    return {name: error for name, error in found.items() if not error[0] <= BOUND}


def test_exact(pool2: Pool) -> None:
    assert pool2.run(errors, {"tp": 2}, FEW, {}, timeout=120) == [{}, {}]


@pytest.mark.slow
def test_exact_for_all(pool2: Pool) -> None:
    assert pool2.run(errors, {"tp": 2}, list(MODELS.keys() - FEW), {}, timeout=200) == [{}, {}]


LEVERS: list[dict[str, Any]] = [
    {"sequence_parallel": True},
    {"activation_checkpointing": True},
    {"enable_compile": True, "compile_backend": "aot_eager"},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    with_long(LEVERS, LEVERS[1]),
    ids=lambda fields: next(iter(fields)),
)
def test_exact_with(fields: dict[str, Any], pool2: Pool) -> None:
    assert pool2.run(errors, {"tp": 2}, ONE_OF_EACH, fields, timeout=240) == [{}, {}]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", with_long([{"dp_shard": 2, "tp": 2}, {"tp": 4}], {"tp": 4}), ids=str)
def test_exact_on_four_ranks(sizes: dict[str, int], pool4: Pool) -> None:
    """With a head for each rank, a share of the biases looks like one for all heads."""
    assert pool4.run(errors, sizes, [*ONE_OF_EACH, "lora"], {}, timeout=200) == [{}] * 4


def written(names: list[str]) -> dict[str, bool]:
    """Runs on each rank: whether the tokens that a model writes are those of one process."""
    mesh, ids = build_mesh(resolve_sizes(2, tp=2), "cpu"), torch.arange(3, 36).view(3, 11)
    found = {}
    for name in names:
        model: Any = MODELS[name]().eval()
        one = copy.deepcopy(model).generate(input_ids=ids, max_new_tokens=8, use_cache=True)
        many: Any = parallelize(model, mesh)
        found[name] = torch.equal(one, many.eval().generate(input_ids=ids, max_new_tokens=8, use_cache=True))
    return found


@pytest.mark.slow
def test_generation(pool2: Pool) -> None:
    names = ["t5", "umt5", "longt5, transient global", "bloom", "falcon with alibi", "mpt"]
    assert pool2.run(written, names, timeout=120) == [dict.fromkeys(names, True)] * 2


def test_what_a_rank_has() -> None:
    layout = derive_layout(t5(), select_plan(t5()), 2)
    attention = "decoder.block.0.layer.0.SelfAttention"
    assert layout.parameters[f"{attention}.relative_attention_bias.weight"].placement == Shard(1)
    assert layout.parameters[f"{attention}.q.weight"].placement == Shard(0)
    assert layout.attributes[attention] == {"n_heads": 2}
    mpt_layout = derive_layout(mpt(), select_plan(mpt()), 2)
    assert mpt_layout.parameters["transformer.blocks.0.attn.Wqkv.weight"].placement != Replicate()


def test_features_of_positions_are_not_numbers_of_heads() -> None:
    sizes: dict[str, Any] = {"encoder_layers": 2, "decoder_layers": 2}
    config = SpeechT5Config(hidden_size=16, encoder_attention_heads=4, decoder_attention_heads=4, **sizes)
    with torch.device("meta"):
        rules = known_rules(SpeechT5ForTextToSpeech(config))
    assert rules
    assert {style for rule, style in rules.items() if "attn" in rule or "attention" in rule} == {
        "colwise_gather_output"
    }


def test_a_table_that_others_read_stays_whole() -> None:
    """Biases of UDOP's encoder are looked up by attention of its first layer, and by the model."""
    rules = known_rules(tiny_model("udop"))
    assert "encoder.block.1.layer.0.SelfAttention.q" in rules
    assert not [rule for rule in rules if rule.startswith(("encoder.block.0.layer.0", "encoder.block.*.layer.0"))]


def split_stages() -> list[bool]:
    """Runs on each rank: whether models whose stages have their own numbers of heads are split."""
    sizes: dict[str, Any] = {"hidden_sizes": [16] * 4, "num_attention_heads": [2, 2, 2, 4], "depths": [1] * 4}
    models = [
        SegformerForImageClassification(SegformerConfig(**sizes)),
        PvtForImageClassification(PvtConfig(**sizes, image_size=64)),
    ]
    mesh = build_mesh(resolve_sizes(2, tp=2), "cpu")
    return [any(p.shape != p.to_local().shape for p in parallelize(m, mesh).parameters()) for m in models]


def test_numbers_of_heads_of_stages(pool2: Pool) -> None:
    assert pool2.run(split_stages) == [[True, True]] * 2


# ---- beside layers that give all heads -------------------------------------------------------------------------------


def falcon_of_one_key() -> nn.Module:
    """One key and value for all queries: its matrices are split, and all heads computed, with the biases of all."""
    return tiny_model("falcon", new_decoder_architecture=False, multi_query=True, alibi=True)


def rules(attention: str, row: str, *columns: str, style: str) -> dict[str, Any]:
    given = {"colwise_gather_output": "rowwise_split_input", "colwise_rep": "rowwise_rep"}.get(style, style)
    named = {f"{attention}.{name}": style for name in columns} | {f"{attention}.{row}": given}
    return {"tp_plan": {"extends": "model", **named}}


_ATTENTION = "model.layers.*.self_attn"
_LATENT = partial(rules, _ATTENTION, "o_proj", "q_b_proj", "kv_b_proj")
_USUAL = partial(rules, _ATTENTION, "o_proj", "q_proj", "k_proj", "v_proj")
BESIDE_ALL_HEADS: dict[str, tuple[Any, dict[str, Any]]] = {
    "alibi": (falcon_of_one_key, {}),
    "sinks": (partial(tiny_model, "gpt_oss"), _USUAL(style="replicate")),
    "norms": (partial(tiny_model, "qwen3"), _USUAL(style="colwise_gather_output")),
    "latent": (partial(tiny_model, "deepseek_v3"), _LATENT(style="colwise_gather_output")),
    "latent, by other names": (partial(tiny_model, "deepseek_v3"), _LATENT(style="colwise_rep")),
    "whole latent": (partial(tiny_model, "deepseek_v2"), _LATENT(style="replicate")),
    "table": (t5, rules("encoder.block.0.layer.0.SelfAttention", "o", "q", "k", "v", style="replicate")),
}


def errors_beside_all_heads() -> dict[str, Any]:
    """Run on each rank: the largest error of each case that has one."""
    cases = BESIDE_ALL_HEADS.items()
    found = {
        name: compare(make, {"tp": 2}, 2, SCHEDULE, FSDP2Config(**fields)).largest for name, (make, fields) in cases
    }
    return {name: error for name, error in found.items() if not error[0] <= BOUND}


def test_what_goes_with_heads_is_whole_beside_layers_that_give_all_of_them(pool2: Pool) -> None:
    assert pool2.run(errors_beside_all_heads, timeout=120) == [{}, {}]
