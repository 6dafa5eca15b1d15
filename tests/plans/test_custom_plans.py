"""Plans of users: the documented one is exact, heads are divided, and what would give other numbers is an error."""

import copy
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel
from transformers import BertConfig, BertForMaskedLM
from transformers.modeling_outputs import CausalLMOutput

from lightning_automodel.config import FSDP2Config
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.plans import derive_layout, select_plan, validate_tp
from lightning_automodel.plans.styles import STYLES, Leave
from lightning_automodel.testing.pool import Pool, RankFailed
from tests.plans.support import BOUND, PACKED_PLAN, SCHEDULE, build_gpt2, build_llama, build_opt, build_packed
from tests.support.comparison import compare
from tests.support.families import tiny_model

DOCUMENT = (Path(__file__).parents[2] / "docs" / "plans.md").read_text()
DECODER, PERSIMMON, MOSHI = "model.decoder.layers.*", "model.layers.*.self_attn", "model.layers.*.mlp"
FUSED = {f"{PERSIMMON}.query_key_value": "interleaved_colwise", f"{PERSIMMON}.dense": "rowwise"}
GATED = {f"{MOSHI}.fc1": "packed_colwise", f"{MOSHI}.fc2": "rowwise"}
ADDS = {
    "transformer.blocks.*.ffn": "separate",  # it is handed the residual stream, and adds it
    "transformer.blocks.*.ffn.up_proj": "colwise",
    "transformer.blocks.*.ffn.down_proj": "rowwise",
}
BIOGPT = {"biogpt.layers.*.fc1": "colwise", "biogpt.layers.*.fc2": "rowwise"}
_BERT = "bert.encoder.layer.*"
BERT = {
    **{f"{_BERT}.attention.self.{name}": "colwise" for name in ("query", "key", "value")},  # heads leave this module
    f"{_BERT}.intermediate.dense": "colwise",
    **{f"{_BERT}.{name}.dense": "rowwise" for name in ("attention.output", "output")},
}
TIED = BERT | {"bert.embeddings.word_embeddings": "embedding_rowwise"}  # the head follows, with its bias
ATTENTION = {**{f"{DECODER}.self_attn.{n}_proj": "colwise" for n in "qkv"}, f"{DECODER}.self_attn.out_proj": "rowwise"}


def documented() -> dict[str, str]:
    """The worked example, run as it stands."""
    (block,) = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    return names["strategy"].config.tp_plan


def test_every_style_is_documented() -> None:
    rows = "\n".join(row.split("|")[1] for row in DOCUMENT.splitlines() if row.startswith("| `"))
    assert sorted(re.findall(r"`(\w+)`", rows)) == sorted(STYLES)


def build_masked() -> nn.Module:
    """BERT with its head, of a vocabulary that two ranks share unevenly, and biases that are not zero."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 131, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}
    undropped = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertForMaskedLM(BertConfig(**sizes, **undropped, num_attention_heads=4))
    for parameter in model.parameters():
        if parameter.ndim == 1:  # a key's bias has no gradient but rounding, which counts for much beside a zero
            nn.init.normal_(parameter, std=0.1)
    return model


def errors() -> dict[str, tuple[float, str]]:
    """Runs on each rank."""
    tiny = {"gptj": "transformer.h.*.attn", "whisper": "model.decoder.layers.*.self_attn"}
    plans = {
        name: {f"{at}.{n}_proj": "colwise" for n in "qkv"} | {f"{at}.out_proj": "rowwise"} for name, at in tiny.items()
    }
    cases: dict[str, tuple[Any, Any]] = {
        "documented": (build_opt, documented()),
        **{name: (partial(tiny_model, name), plan) for name, plan in plans.items()},
        "fused": (partial(tiny_model, "persimmon"), FUSED),
        "gated": (partial(tiny_model, "moshi"), GATED),
        "packed": (build_packed, PACKED_PLAN),
        "columns and rows in two modules": (partial(tiny_model, "bert"), BERT),
        "tied head with a bias": (build_masked, TIED),
        "residual inside": (partial(tiny_model, "mpt"), ADDS),
    }
    return {name: _error(build, plan) for name, (build, plan) in cases.items()}


class AcrossHeads(nn.Module):
    """Activations that depend on all features of a feed-forward whose second matrix is another module's."""

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.gelu(hidden - hidden.mean(-1, keepdim=True))


def changed_bert() -> nn.Module:
    model = tiny_model("bert")
    model.bert.encoder.layer[0].intermediate.intermediate_act_fn = AcrossHeads()
    return model


def split_changed_bert() -> None:
    """Runs on each rank."""
    _error(changed_bert, BERT)


def test_what_leaves_as_a_part_is_compared_with_a_part_of_the_whole(pool2: Pool) -> None:
    with pytest.raises(RankFailed, match=r"layer\.0\.intermediate \(BertIntermediate\) gives other numbers with parts"):
        pool2.run(split_changed_bert)


class Bare(nn.Module):
    """A pair of layers that a user plans, in no block and with another matrix beside it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(131, 6), nn.LayerNorm(6)
        self.up, self.down, self.head = nn.Linear(6, 9), nn.Linear(9, 6), nn.Linear(6, 131)

    def forward(self, input_ids: Tensor, labels: Tensor, **_: Any) -> CausalLMOutput:
        hidden = self.norm(self.embed(input_ids))
        logits = self.head(hidden + self.down(self.up(hidden).relu()))
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)


class Tied(Bare):
    """Its head has the matrix of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


def errors_of_bare_pairs() -> dict[str, tuple[float, str]]:
    """Runs on each rank."""
    pair = {"up": "colwise", "down": "rowwise"}
    plans = {"pair": pair, "second alone": {"down": "rowwise"}, "head": {**pair, "head": "colwise_gather_output"}}
    tied = {end: _error(Tied, {**pair, end: "replicate"}) for end in ("embed", "head")}
    return {**{name: _error(Bare, plan) for name, plan in plans.items()}, **tied}


def errors_of_cut_streams() -> dict[str, tuple[float, str]]:
    """Runs on each rank: blocks whose own code stands between a column and a row style, on an odd number of tokens."""
    dropout = dict.fromkeys(("activation_dropout", "hidden_dropout_prob"), 0.2)
    cases: dict[str, tuple[Any, Any]] = {
        "flattened by the block": (build_opt, documented()),
        "dropped by the block": (partial(tiny_model, "biogpt", **dropout), BIOGPT),
    }
    return {name: _error(build, plan, length=13, sequence_parallel=True) for name, (build, plan) in cases.items()}


def _error(build: Any, plan: Any, length: int = 12, sequence_parallel: bool = False) -> tuple[float, str]:
    config = FSDP2Config(tp_plan=plan, sequence_parallel=sequence_parallel)
    return compare(build, {"tp": 2}, 2, replace(SCHEDULE, length=length), config).largest


@pytest.mark.slow
def test_custom_plans_are_exact(pool2: Pool) -> None:
    for found in pool2.run(errors) + pool2.run(errors_of_bare_pairs) + pool2.run(errors_of_cut_streams):
        assert {name: error for name, error in found.items() if error[0] > BOUND} == {}


def packed_on_data_ranks() -> tuple[float, list[str]]:
    """Runs on each rank: the error of training, and parameters of which DTensor gathers another tensor."""
    config = FSDP2Config(tp_plan=PACKED_PLAN)
    sizes, reference = {"dp_shard": 2, "tp": 2}, build_packed()
    model = parallelize(copy.deepcopy(reference), build_mesh(resolve_sizes(4, **sizes), "cpu"), config)
    wrong = [n for n, p in model.named_parameters() if not p.full_tensor().equal(reference.get_parameter(n))]
    return compare(build_packed, sizes, 4, SCHEDULE, config).largest[0], wrong


@pytest.mark.slow
def test_stacked_matrices_are_cut_on_columns_by_data_ranks(pool4: Pool) -> None:
    for error, wrong in pool4.run(packed_on_data_ranks):
        assert error < BOUND
        assert wrong == []


def test_the_documented_plan_leaves_no_matrix_of_a_layer_whole() -> None:
    model = build_opt()
    layout = derive_layout(model, select_plan(model, documented()), 2)
    matrices = [n for n, p in model.named_parameters() if p.ndim == 2 and "embed_positions" not in n]
    assert [n for n in matrices if layout.parameters[n].placement == Replicate()] == []


# ---- mistakes --------------------------------------------------------------------------------------------------------


class ReadsConfig(nn.Module):
    """An attention module that asks its config for the number of heads."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.q_proj, self.out_proj = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out_proj(self.q_proj(x).view(len(x), -1, self.config.num_attention_heads, 2).flatten(2))


def reads_config() -> nn.Module:
    model = build_opt()
    for layer in model.model.decoder.layers:
        layer.self_attn = ReadsConfig(model.config)
    return model


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3))


MIXING = ("mixes.0", "mixes.0.out_proj", "mixes.0.in_proj_weight")


def mixes() -> nn.Module:
    return nn.ModuleDict({"mixes": nn.ModuleList([nn.MultiheadAttention(8, 2)])})


@pytest.mark.parametrize(
    ("build", "rules", "message"),
    [
        (convolutions, {"0": "colwise", "1": "rowwise"}, r"'\*' \(Conv2d\) .* it is a convolution"),
        *((mixes, {rule: "rowwise"}, "computes with all matrices of .* itself") for rule in MIXING),
        (build_llama, {"model.layers.*.mlp.up_proj": "embedding_rowwise"}, r"\(Linear\) .* for torch.nn.Embedding"),
        (
            build_llama,
            {"model.embed_tokens": "colwise"},
            r"'model.embed_tokens' \(Embedding\) .* use one of embedding_",
        ),
        (
            build_llama,
            {"extends": "model", "model.embed_tokens": "rowwise"},
            "the style rowwise, but an embedding looks rows up",
        ),
        (build_llama, {"model.layers.*.mlp": "colwise"}, r"no parameter of its own .* holds gate_proj, up_proj"),
        (
            build_opt,
            {f"{DECODER}.fc1.weight": "colwise"},
            r"no collectives; name the module: 'model.decoder.layers.\*.fc1'",
        ),
        (build_llama, {"model.layers.*.mlp.up_proj": "colwise"}, "no module around it or beside it .* that sums"),
        *(
            (build, {"extends": "model", "model.layers.*.self_attn.o_proj": "replicate"}, r"q_proj' .* that sums")
            for build in (build_llama, partial(tiny_model, "gpt_oss"))
        ),
        (
            build_gpt2,
            {"extends": "model", "transformer.h.*.mlp.c_fc": "replicate"},
            r"mlp.c_proj' .* no layer beside it .*; use rowwise_split_input",
        ),
        (
            build_llama,
            {"extends": "model", "model.layers.*.mlp.up_proj": "turned_colwise"},
            r"mlp.up_proj' .*turned_colwise.* stacked matrices \[..., in, out\] .*; use colwise",
        ),
        (build_llama, {"extends": "model", "lm_head": "colwise"}, "'lm_head' .* use colwise_gather_output"),
        (build_opt, {f"{DECODER}.fc1": "split_heads"}, r"split_heads, but it has no attribute that counts heads"),
        (
            build_gpt2,
            {"transformer.h.*.attn.c_attn": "colwise", "transformer.h.*.attn.c_proj": "rowwise"},
            "gives 96 features .* packed_qkv_colwise for a query, key and value",
        ),
        (
            build_gpt2,
            {"transformer.h.*.mlp.c_fc": "packed_qkv_colwise", "transformer.h.*.mlp.c_proj": "rowwise"},
            "its 128 features are not 3 matrices of one width",
        ),
        (reads_config, ATTENTION, r"self_attn \(ReadsConfig\) reads config.num_attention_heads"),
        (
            partial(tiny_model, "persimmon"),
            dict.fromkeys(FUSED, "colwise") | {f"{PERSIMMON}.dense": "rowwise"},
            "alternate",
        ),
        (
            partial(tiny_model, "moshi"),
            GATED | {f"{MOSHI}.fc1": ColwiseParallel()},
            "Use packed_colwise where two stand",
        ),
    ],
    ids=lambda value: "" if callable(value) else None,
)
def test_styles_that_do_not_fit(build: Any, rules: dict[str, Any], message: str) -> None:
    model = build()
    with pytest.raises(ValueError, match=message):
        derive_layout(model, select_plan(model, rules), 2)


EXPERTS = "model.layers.*.mlp.experts"


@pytest.mark.parametrize(
    ("rules", "lacking"),
    [
        ({EXPERTS: "moe_tp_experts"}, "no rule splits it"),
        ({EXPERTS: "moe_tp_experts", f"{EXPERTS}.down_proj": "rowwise"}, "gate_up_proj is whole .* no rule splits it"),
        ({EXPERTS: "all_reduce", f"{EXPERTS}.w3": "rowwise"}, rf"the rules '{re.escape(EXPERTS)}.w3' match nothing"),
        (
            {
                EXPERTS: "moe_tp_experts",
                **dict.fromkeys((f"{EXPERTS}.down_proj", f"{EXPERTS}.gate_up_proj"), "replicate"),
            },
            "no rule splits it",
        ),
        ({"extends": "model", f"{EXPERTS}.gate_up_proj": "replicate"}, None),
    ],
)
@pytest.mark.filterwarnings("ignore:.*match nothing and are dropped")
def test_whole_values_are_not_summed(rules: dict[str, str], lacking: str | None) -> None:
    model = tiny_model("mixtral")
    if lacking is None:  # named as whole beside slices: the user's word
        derive_layout(model, select_plan(model, rules), 2)
        return
    with pytest.raises(ValueError, match=rf"experts' .* count what it gives tp times: .*{lacking}|{lacking}"):
        derive_layout(model, select_plan(model, rules), 2)


@pytest.mark.parametrize("style", ["ep_dispatch_experts", "moe_tp_experts"])
def test_experts_that_are_modules_are_split_by_rules_of_their_layers(style: str) -> None:
    """A rule for a parameter of theirs, which is what other sums lack, would be the next error."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            feed_forward = (nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(4))
            self.experts = nn.ModuleList(feed_forward)

    model = nn.Sequential(Block(), Block())
    with pytest.raises(ValueError, match=rf"0.experts.0.0 is whole .* {style} .* stacked .*'\*.experts.\*.\*': 'colw"):
        derive_layout(model, select_plan(model, {"*.experts": style}), 2)
    rules = {"*.experts": style, "*.experts.*.0": "colwise", "*.experts.*.2": "rowwise"}
    assert derive_layout(model, select_plan(model, rules), 2).parameters["1.experts.3.0.weight"].placement == Shard(0)


def test_heads_that_ranks_cannot_share() -> None:
    """All heads are computed by each rank, whoever wrote the plan."""
    model = build_opt()
    layout = derive_layout(model, select_plan(model, ATTENTION), 3)
    validate_tp(model, 3, layout)
    projections = [name for name, around in layout.modules.items() if around.leave is Leave.GATHER]
    assert [name.rpartition(".")[2] for name in projections] == ["k_proj", "v_proj", "q_proj"] * 2
    assert not layout.attributes
