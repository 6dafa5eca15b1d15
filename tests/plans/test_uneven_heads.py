"""Heads that tp does not divide: each rank stores its part of the matrices, and computes all heads."""

import warnings
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from transformers import (
    BertConfig,
    BertLMHeadModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.llama.modeling_llama import LlamaAttention

from lightning_automodel import FSDP2Config
from lightning_automodel.distributed import logs
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.plans import derive_layout, select_plan, validate_tp
from lightning_automodel.plans.styles import Leave
from lightning_automodel.testing.pool import Pool, RankFailed
from tests.support.comparison import Batch, Schedule, compare
from tests.support.families import tiny_model
from tests.support.marks import with_slow

BOUND = 1e-5
BOUNDS = {"mixed heads": 1e-4, "gated": 1e-4}
"""Masks are computed in float32 (4 heads on 2 ranks come to 1e-5), and a recurrence amplifies rounding (8e-14 in
float64)."""
SCHEDULE = Schedule(steps=2, micro_batches=2, clip=0.5)
ODD: dict[str, Any] = {"num_attention_heads": 3, "num_key_value_heads": 3}
FEW: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 3}
DRY: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def gpt2() -> nn.Module:
    """With 3 heads, as GPT-2 XL has 25."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_embd=48, n_layer=2, n_head=3, vocab_size=128, **DRY))


def t5() -> nn.Module:
    """With 3 heads, and a table of biases for each."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"d_model": 48, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 3}
    return T5ForConditionalGeneration(T5Config(vocab_size=128, dropout_rate=0.0, decoder_start_token_id=0, **sizes))


def bert() -> nn.Module:
    """With 3 heads, and a feed-forward of an odd width: split by the names of layers, which is tried.

    In float64: the gradients of biases of keys are zeros but for rounding.
    """
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3}
    dry: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertLMHeadModel(BertConfig(vocab_size=128, intermediate_size=65, is_decoder=True, **sizes, **dry)).double()


def mixed() -> nn.Module:
    """With a layer that mixes all heads, and a parameter with a number for each."""
    return tiny_model("doge", **ODD)


def adapted() -> nn.Module:
    """Adapters on all linear layers, which are drawn, in float64: low rank cancels in float32."""
    torch.manual_seed(0)
    config = LoraConfig(target_modules="all-linear", init_lora_weights=False, r=3)
    return get_peft_model(tiny_model("llama", **FEW), config).double()  # type: ignore[arg-type]


def other_layers() -> nn.Module:
    """Key/value heads that tp=2 divides in the first layer, and not in the second."""
    model: Any = tiny_model("llama", num_attention_heads=6, num_key_value_heads=6)
    for projection in ("k_proj", "v_proj"):
        setattr(model.model.layers[1].self_attn, projection, nn.Linear(96, 3 * 16, bias=False))
    model.model.layers[1].self_attn.num_key_value_groups = 2
    return model


def saved() -> nn.Module:
    """A copy of attention to train, beside adapters."""
    torch.manual_seed(0)
    config = LoraConfig(target_modules=["up_proj"], modules_to_save=["self_attn"], init_lora_weights=False, r=3)
    return get_peft_model(tiny_model("llama", **FEW), config).double()  # type: ignore[arg-type]


class Shown(LlamaForCausalLM):
    """With a loss of attention maps, in which each head has a weight of its own."""

    def forward(self, **batch: Any) -> Any:
        output: Any = super().forward(**batch, output_attentions=True)
        for scores in output.attentions:
            output.loss = output.loss + (scores.square().mean((0, 2, 3)) * torch.linspace(1, 9, 6)).sum()
        return output


def shown() -> nn.Module:
    """A model that returns the maps of 6 heads."""
    model = tiny_model("llama", **FEW)
    model.__class__ = Shown
    return model


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (partial(tiny_model, "llama", **ODD), {}),
    "grouped": (partial(tiny_model, "qwen3", **FEW), {"sequence_parallel": True, "activation_checkpointing": True}),
    "mixed heads": (mixed, {}),
    "latent": (partial(tiny_model, "deepseek_v3", **ODD), {}),
    "sinks": (partial(tiny_model, "gpt_oss", **ODD), {}),
    "interleaved": (partial(tiny_model, "gpt_neox", num_attention_heads=3), {"sequence_parallel": True}),
    "gated": (partial(tiny_model, "qwen3_next", num_hidden_layers=4, **ODD), {}),
    "stacked": (gpt2, {}),
    "biases of positions": (t5, {}),
    "alibi": (partial(tiny_model, "bloom", hidden_size=48, n_head=3), {"sequence_parallel": True}),
    "by names": (bert, {}),
    "adapters": (adapted, {}),
    "compiled": (partial(tiny_model, "llama", **FEW), {"enable_compile": True, "compile_backend": "aot_eager"}),
    "packed": (partial(tiny_model, "granitemoehybrid", shared_intermediate_size=65), {"sequence_parallel": True}),
    "single layers": (other_layers, {}),
    "attention to save": (saved, {}),
    "maps": (shown, {}),
}


def for_both(schedule: Schedule, step: int, data_rank: int) -> list[Batch]:
    """Text that an encoder-decoder reads, too."""
    generator = torch.Generator().manual_seed(97 * step + data_rank)
    texts = [torch.randint(3, 128, (2, 9), generator=generator) for _ in range(schedule.micro_batches)]
    return [{"input_ids": text, "labels": text} for text in texts]


def errors(sizes: dict[str, int], names: Iterable[str]) -> dict[str, Any]:
    """Runs on each rank: the largest error of each case that has one."""
    world, found = torch.distributed.get_world_size(), {}
    warnings.filterwarnings("ignore", "tp=. does not divide")
    for name in names:
        build, fields = CASES[name]
        found[name] = compare(build, sizes, world, SCHEDULE, FSDP2Config(**fields), draw=for_both).largest
    return {name: error for name, error in found.items() if not error[0] <= BOUNDS.get(name, BOUND)}


FAST = ("grouped", "sinks", "stacked", "biases of positions", "by names", "adapters", "packed")
OTHERS = tuple(sorted(CASES.keys() - set(FAST)))


@pytest.mark.parametrize("group", with_slow(["few", "others"], "others"))
def test_exact(group: str, pool2: Pool) -> None:
    names = FAST if group == "few" else OTHERS
    assert pool2.run(errors, {"tp": 2}, names, timeout=240) == [{}, {}]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"dp_shard": 2, "tp": 2}, {"tp": 4}, {"cp": 2, "tp": 2}], ids=str)
def test_exact_on_four_ranks(sizes: dict[str, int], pool4: Pool) -> None:
    of_whole_texts = ("biases of positions", "by names", "alibi", "maps")  # under cp a rank has its rows of maps
    names = [name for name in CASES if "cp" not in sizes or name not in of_whole_texts]
    assert pool4.run(errors, sizes, names, timeout=300) == [{}] * 4


def written(path: str) -> list[list[int]]:
    """Runs on each rank: what a model read from files writes, sampled, with a cache of keys and values."""
    warnings.filterwarnings("ignore", "tp=2 does not divide")
    model: Any = Qwen2ForCausalLM.from_pretrained(path)
    if torch.distributed.is_initialized():
        model = parallelize(model, build_mesh(resolve_sizes(2, tp=2), "cpu"), FSDP2Config())
    torch.manual_seed(5)
    tokens = model.generate(torch.arange(3, 9)[None].repeat(2, 1), max_new_tokens=6, do_sample=True, pad_token_id=0)
    return tokens.tolist()


class Scaled(LlamaAttention):
    """A user's, that computes with a matrix itself."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output, scores = super().forward(*args, **kwargs)
        return output / self.q_proj.weight.norm(), scores


def scaled() -> None:
    """Runs on each rank."""
    model: Any = tiny_model("llama", **ODD)
    for layer in model.model.layers:
        layer.self_attn.__class__ = Scaled
    model = parallelize(model, build_mesh(resolve_sizes(2, tp=2), "cpu"), FSDP2Config())
    model(input_ids=torch.arange(12)[None])


def test_code_of_users_that_reads_a_part_of_a_matrix_is_an_error(pool2: Pool) -> None:
    with pytest.raises(RankFailed, match=r"layers\.0\.self_attn \(Scaled\) gives other numbers with parts"):
        pool2.run(scaled)


def test_generated_as_by_one_process(tmp_path: Any, pool2: Pool) -> None:
    model: Any = tiny_model("qwen2", **FEW)
    model.save_pretrained(tmp_path)
    assert pool2.run(written, str(tmp_path)) == [written(str(tmp_path))] * 2


class PlainModel(PreTrainedModel):
    """A model of transformers, to hold layers of a user's."""

    config_class = PreTrainedConfig


# ---- what a rank has -------------------------------------------------------------------------------------------------


def on_meta(model_class: type, config: Any) -> Any:
    with torch.device("meta"):
        return model_class(config)


def layout_of(model: Any, tp: int) -> Any:
    layout = derive_layout(model, select_plan(model), tp)
    validate_tp(model, tp, layout)
    return layout


def test_a_rank_stores_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_seen", set())
    sizes: dict[str, Any] = {"num_attention_heads": 28, "num_key_value_heads": 4, "num_hidden_layers": 2}
    model = on_meta(Qwen2ForCausalLM, Qwen2Config(hidden_size=3584, intermediate_size=18944, **sizes))
    told = r"tp=8 does not divide num_attention_heads=28 of model.layers.\*.self_attn: .*is faster \(2, 4\)"
    with pytest.warns(UserWarning, match=told):
        layout = layout_of(model, 8)
    attention = "model.layers.0.self_attn"
    assert {layout.parameters[f"{attention}.{p}_proj.weight"].placement for p in "qkv"} == {Shard(0)}
    assert layout.parameters[f"{attention}.o_proj.weight"].placement == Shard(1)
    assert layout.modules[f"{attention}.k_proj"].leave is Leave.GATHER
    assert layout.boundaries == ["model.layers.0.mlp", "model.layers.1.mlp"]


def test_what_stands_beside_stays_whole() -> None:
    layout = layout_of(tiny_model("gpt_oss", **ODD), 2)
    sinks = layout.parameters["model.layers.0.self_attn.sinks"]
    assert (sinks.placement, sinks.gradient) == (Replicate(), Replicate())
    table = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    assert layout_of(t5(), 2).parameters[table].placement == Replicate()


def test_attention_that_is_whole_by_its_plan_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Phi-4 has 40 heads, and 10 of keys and values; its plan gathers them anyway."""
    monkeypatch.setattr(logs, "_seen", set())
    sizes: dict[str, Any] = {"num_attention_heads": 40, "num_key_value_heads": 10, "num_hidden_layers": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layout_of(on_meta(Phi3ForCausalLM, Phi3Config(hidden_size=5120, intermediate_size=17920, **sizes)), 4)


def test_a_layer_that_writes_from_the_block_is_not_found() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_heads, self.q_proj = 3, nn.Linear(48, 48)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.out = Attention(), nn.Linear(48, 48)

        def forward(self, hidden: Tensor) -> Tensor:
            return self.out(self.attention.q_proj(hidden))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block()])

        def forward(self, hidden: Tensor) -> Tensor:
            for block in self.blocks:
                hidden = block(hidden)
            return hidden

    model = Model()
    plan = select_plan(model, {"blocks.*.attention.q_proj": "colwise", "blocks.*.out": "rowwise"})
    with pytest.raises(ValueError, match=r"tp=2 does not fit Model with num_attention_heads=3: .*use one of 1, 3"):
        derive_layout(model, plan, 2)
    assert derive_layout(model, plan, 3).parameters["blocks.0.attention.q_proj.weight"].placement == Shard(0)


def test_code_that_divides_features_by_numbers_of_its_own_is_an_error() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.size, self.q_proj, self.o_proj = 16, nn.Linear(48, 48), nn.Linear(48, 48)

        def forward(self, hidden: Tensor) -> Tensor:
            return self.o_proj(self.q_proj(hidden).unflatten(-1, (-1, self.size)).flatten(-2))

    model = PlainModel(PreTrainedConfig(num_attention_heads=3))
    model.blocks = nn.ModuleList([Attention(), Attention()])
    plan = select_plan(model, {"blocks.*.q_proj": "colwise", "blocks.*.o_proj": "rowwise"})
    with pytest.raises(ValueError, match=r"tp=2 does not fit PlainModel with num_attention_heads=3: .*use one of 1, 3"):
        derive_layout(model, plan, 2)
