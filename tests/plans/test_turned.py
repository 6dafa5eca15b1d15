"""Layers that store their matrix as [in, out] (GPT-2's): split by names or by rules of one's own, and adapted."""

from fnmatch import fnmatch
from functools import partial
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from torch import nn
from torch.distributed.tensor import Shard
from transformers import GPT2Config, GPT2LMHeadModel, OpenAIGPTConfig, OpenAIGPTLMHeadModel

from lightning_automodel import FSDP2Config
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.modules.wrappers import without_wrappers
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.plans import derive_layout, select_plan
from lightning_automodel.plans.selection import known_rules
from lightning_automodel.plans.styles import Leave
from lightning_automodel.plans.validation import validate_tp
from lightning_automodel.testing.pool import Pool, RankFailed
from tests.plans.support import BOUND, SCHEDULE, build_gpt2
from tests.support.comparison import compare
from tests.support.marks import with_long

BLOCK = "transformer.h.*"
LAYERS = ["c_attn", "c_proj", "c_fc"]


def adapted(build: Any, **fields: Any) -> nn.Module:
    """GPT-2 with adapters on all layers of its blocks, which are drawn, in float64: low rank cancels in float32."""
    torch.manual_seed(0)
    if build is IA3Config:
        config = IA3Config(target_modules=LAYERS, feedforward_modules=["c_fc"], fan_in_fan_out=True, **fields)
    else:
        config = LoraConfig(target_modules=LAYERS, init_lora_weights=False, fan_in_fan_out=True, r=2, **fields)
    model = get_peft_model(build_gpt2(), config).double()  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape) * 0.1)
    return model


def crossed() -> nn.Module:
    """Blocks with a cross-attention that nothing calls."""
    torch.manual_seed(0)
    config = GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=128, add_cross_attention=True)
    return GPT2LMHeadModel(config)


def shown() -> nn.Module:
    """Attention that returns its maps, too, in a list."""
    torch.manual_seed(0)
    dry: Any = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "output_attentions": True}
    return OpenAIGPTLMHeadModel(OpenAIGPTConfig(n_embd=32, n_layer=2, n_head=4, vocab_size=128, **dry))


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "names": (build_gpt2, {}),
    "sequence_parallel": (build_gpt2, {"sequence_parallel": True}),
    "gathered": (
        build_gpt2,
        {"tp_plan": {f"{BLOCK}.mlp.c_fc": "colwise_gather_output", f"{BLOCK}.mlp.c_proj": "rowwise_split_input"}},
    ),
    "shown": (shown, {}),
    "lora": (partial(adapted, LoraConfig), {}),
    "lora with biases": (partial(adapted, LoraConfig, bias="all"), {}),
    "dora": (partial(adapted, LoraConfig, use_dora=True), {}),
    "ia3": (partial(adapted, IA3Config), {}),
    "feed-forward to save": (partial(adapted, LoraConfig, modules_to_save=["mlp"]), {}),
    "attention to save": (partial(adapted, LoraConfig, modules_to_save=["attn"]), {}),
}


def errors(sizes: dict[str, int], names: list[str]) -> dict[str, Any]:
    """Runs on each rank: the largest error of each case that has one."""
    world = torch.distributed.get_world_size()
    found = {}
    for name in names:
        build, fields = CASES[name]
        found[name] = compare(build, sizes, world, SCHEDULE, FSDP2Config(**fields)).largest
    return {name: error for name, error in found.items() if not error[0] <= BOUND}


def test_exact(pool2: Pool) -> None:
    assert pool2.run(errors, {"tp": 2}, list(CASES), timeout=200) == [{}, {}]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", with_long([{"dp_shard": 2, "tp": 2}, {"tp": 4}], {"tp": 4}), ids=str)
def test_exact_on_four_ranks(sizes: dict[str, int], pool4: Pool) -> None:
    assert pool4.run(errors, sizes, list(CASES), timeout=300) == [{}] * 4


def misread(dtype: torch.dtype) -> None:
    """Runs on each rank: a plan that takes queries, keys and values for alternating heads."""
    config = FSDP2Config(tp_plan={"extends": "model", f"{BLOCK}.attn.c_attn": "interleaved_colwise"})
    model = parallelize(build_gpt2().to(dtype), build_mesh(resolve_sizes(2, tp=2), "cpu"), config)
    model(input_ids=torch.arange(12)[None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_wrong_style_is_told(dtype: torch.dtype, pool2: Pool) -> None:
    with pytest.raises(RankFailed, match=r"h\.0\.attn \(GPT2Attention\) gives other numbers with parts"):
        pool2.run(misread, dtype)


def test_what_a_rank_has() -> None:
    model: Any = build_gpt2()
    layout = derive_layout(model, select_plan(model), 2)
    block = "transformer.h.0"
    assert layout.parameters[f"{block}.mlp.c_fc.weight"].placement == Shard(1)
    assert layout.parameters[f"{block}.mlp.c_fc.bias"].placement == Shard(0)
    assert layout.parameters[f"{block}.mlp.c_proj.weight"].placement == Shard(0)
    assert layout.parameters[f"{block}.mlp.c_proj.bias"].on_first_rank
    assert layout.parameters[f"{block}.attn.c_attn.bias"].stacked == 3
    assert layout.attributes[f"{block}.attn.c_attn"] == {"nf": model.transformer.h[0].attn.c_attn.nf // 2}


def test_copies_of_a_module_lend_no_names() -> None:
    model: Any = get_peft_model(build_gpt2(), LoraConfig(target_modules=["c_attn"], modules_to_save=["mlp"]))  # type: ignore[arg-type]
    plain = model.get_base_model()
    with without_wrappers(plain):
        names = [name for name, _ in plain.named_modules()]
    assert {any(fnmatch(name, rule) for name in names) for rule in known_rules(plain)} == {True}


def test_layers_that_fit_no_other_give_all_features() -> None:
    model = crossed()
    layout = derive_layout(model, select_plan(model), 2)
    joined = [n for n, m in layout.modules.items() if m.leave is Leave.GATHER]
    layers = ("c_attn", "c_proj", "q_attn")
    assert {n.rpartition("0.")[2] for n in joined if ".h." in n} == {f"crossattention.{name}" for name in layers}


def test_widths_that_tp_does_not_divide_are_told() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=128, n_inner=66))
    with pytest.raises(ValueError, match=r"tp=4 does not fit GPT2LMHeadModel with .*mlp.c_fc.nf=66"):
        validate_tp(model, 4, derive_layout(model, select_plan(model), 4))
