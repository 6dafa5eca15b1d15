"""Choosing a plan: the user's in every form, one that is registered, the model's own, or an error that says more."""

import copy
import logging

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import LlamaConfig, LlamaForCausalLM, ReformerModelWithLMHead
from transformers.models.llama.modeling_llama import LlamaAttention

from lightning_automodel.config import FSDP2Config
from lightning_automodel.distributed import logs
from lightning_automodel.parallelizer import (
    get_hf_tp_plan,
    get_hf_tp_shard_plan,
    import_class_from_path,
    import_classes_from_paths,
    parallelize,
    register_tp_plan,
    translate_to_torch_parallel_style,
)
from lightning_automodel.plans import select_plan
from lightning_automodel.plans.additions import ADDITIONS, CORRECTIONS
from lightning_automodel.plans.selection import known_rules
from lightning_automodel.plans.styles import STYLES
from lightning_automodel.plans.torch_styles import ReplicatedWithGradAllReduce, name_of_style
from lightning_automodel.testing.pool import Pool
from tests.plans import support
from tests.plans.support import BOUND, OPT_PLAN, SCHEDULE, build_llama, build_opt, build_reformer
from tests.support.comparison import compare
from tests.support.families import tiny_model

HERE = "tests.plans.support"
TYPO = {"extends": "model", "model.layer.*.typo": "colwise"}
OVERRIDES = {"extends": "model", "lm_head": "replicate", "model.layers.1.mlp.down_proj": "rowwise"}


def registered(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    register_tp_plan("OPTForCausalLM", OPT_PLAN)
    return parallelize(model, mesh)


def overridden(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    parallelize(model, mesh, FSDP2Config(tp_plan=OVERRIDES))
    placements = {name: parameter.placements[-1] for name, parameter in model.named_parameters()}
    assert placements["lm_head.weight"] == Replicate()
    assert placements["model.embed_tokens.weight"] == Shard(0)
    return model


def torch_styles(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize(model, mesh, FSDP2Config(tp_plan=get_hf_tp_shard_plan(model)))


def errors() -> dict[str, tuple[float, str]]:
    """Runs on each rank: the largest error of each form of a plan."""
    forms = {"torch styles": OPT_PLAN, "path to a dict": f"{HERE}.OPT_PLAN", "path to a function": f"{HERE}.opt_plan"}
    forms["path to a function of the model"] = f"{HERE}.plan_of_model"
    found = {
        form: compare(build_opt, {"tp": 2}, 2, SCHEDULE, FSDP2Config(tp_plan=plan)).largest
        for form, plan in forms.items()
    }
    for make in (registered, overridden, torch_styles):
        build = build_opt if make is registered else build_llama
        found[make.__name__] = compare(build, {"tp": 2}, 2, SCHEDULE, make_parallel=make).largest
    return found


@pytest.mark.slow
def test_every_form_of_a_plan_is_exact(pool2: Pool) -> None:
    for found in pool2.run(errors):
        assert {form: error for form, error in found.items() if error[0] > BOUND} == {}


# ---- which rules -----------------------------------------------------------------------------------------------------


def test_custom_rules_override_registered_ones_and_those_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ADDITIONS, "LlamaForCausalLM", {"lm_head": "replicate", "model.norm": "replicate"})
    plan = select_plan(build_llama(), {"extends": "model", "model.norm": "local_params"})
    assert plan.rules["lm_head"] == "replicate"
    assert plan.rules["model.norm"] == "local_params"
    assert plan.rules["model.layers.*.mlp.up_proj"] == "colwise"
    assert plan.source == "10 rules: 8 of the model's own plan, 1 registered for its class, 1 of tp_plan"
    assert "extends" not in plan.rules


def test_corrections_need_a_rule_of_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = {"layers.*.mlp.up_proj": "interleaved_colwise", "layers.*.mlp.other": "colwise"}
    monkeypatch.setitem(CORRECTIONS, "LlamaModel", rules)
    monkeypatch.setitem(CORRECTIONS, "ReformerModel", {"encoder.layers.*.attention.output.dense": "rowwise"})
    plan = select_plan(build_llama())
    assert plan.rules["model.layers.*.mlp.up_proj"] == "interleaved_colwise"
    assert "model.layers.*.mlp.other" not in plan.rules
    assert known_rules(build_reformer()) == {}


def test_a_custom_plan_replaces_the_models_own_unless_it_extends_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_seen", set())
    caplog.set_level(logging.INFO, "lightning_automodel")
    rules = {"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.down_proj": "rowwise"}
    plan = select_plan(build_llama(), rules)
    assert plan.rules == rules
    assert select_plan(build_llama(), {"extends": "model"}).rules == select_plan(build_llama()).rules
    replaced = "LlamaForCausalLM: tensor parallelism by 2 rules: 2 of tp_plan, which replaces the model's own"
    assert caplog.messages[0] == replaced
    select_plan(build_opt(), {"model.decoder.layers.*.fc1": "colwise_gather_output"})
    assert caplog.messages[-1] == "OPTForCausalLM: tensor parallelism by 1 rules: 1 of tp_plan"


def test_the_rule_with_the_fewest_wildcards_applies() -> None:
    plan = select_plan(build_llama(), {"extends": "model", "model.layers.1.mlp.up_proj": "replicate"})
    assert plan.rule_for("model.layers.1.mlp.up_proj") == "model.layers.1.mlp.up_proj"
    assert plan.rule_for("model.layers.2.mlp.up_proj") == "model.layers.*.mlp.up_proj"
    blocks = nn.ModuleDict({"blocks": nn.ModuleList([nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])])})
    assert select_plan(blocks, {"blocks.*.1": "colwise"}).rule_for("blocks.0.0") is None


def test_rules_that_match_nothing_are_reported_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_seen", set())
    caplog.set_level(logging.INFO, "lightning_automodel")
    with pytest.warns(UserWarning, match=r"1 rules .* match nothing and are dropped: \['model.layer.\*.typo'\]"):
        plan = select_plan(build_llama(), TYPO)
    assert "model.layer.*.typo" not in plan.rules
    select_plan(build_llama(), TYPO)
    assert caplog.messages == ["LlamaForCausalLM: tensor parallelism by 9 rules: 9 of the model's own plan"]


# ---- mistakes --------------------------------------------------------------------------------------------------------


class RemoteForCausalLM(ReformerModelWithLMHead):
    """As transformers imports it from a repository of a model."""

    __module__ = "transformers_modules.someone.modeling_remote"


def test_a_model_without_a_plan() -> None:
    with pytest.raises(
        ValueError, match=r"publishes no tensor-parallel plan.*encoder.layers.\*.attention.output.dense.weight"
    ):
        select_plan(build_reformer())
    remote = build_reformer()
    remote.__class__ = RemoteForCausalLM
    with pytest.raises(ValueError, match=r"RemoteForCausalLM \(remote code\) publishes no .*FSDP2Config\(tp_plan="):
        select_plan(remote)


def test_all_unknown_styles_are_named_at_once() -> None:
    rules = {"model.layers.*.mlp.up_proj": "colwyse", "lm_head": "vocab"}
    with pytest.raises(ValueError, match=r"not known: {'model.layers.\*.mlp.up_proj': 'colwyse', 'lm_head': 'vocab'}"):
        select_plan(build_llama(), rules)


def test_a_plan_that_matches_nothing() -> None:
    with pytest.raises(ValueError, match=r"none of the rules .* matches .* names like .*lm_head.weight"):
        select_plan(build_opt(), {"transformer.h.*.attn": "colwise"})


@pytest.mark.parametrize(
    ("path", "message"),
    [("plan", "not an import path"), (f"{HERE}.nothing", "cannot be imported"), (f"{HERE}.NoStyles", "must be a dict")],
)
def test_import_paths_that_give_no_plan(path: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select_plan(build_llama(), path)


def test_import_paths() -> None:
    assert import_class_from_path("transformers.LlamaForCausalLM") is LlamaForCausalLM
    assert import_classes_from_paths([f"{HERE}.NoStyles", f"{HERE}.opt_plan"]) == [support.NoStyles, support.opt_plan]


# ---- torch styles ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("style", "is_embedding", "name"),
    [
        (ColwiseParallel(), False, "colwise"),
        (ColwiseParallel(output_layouts=Shard(2), use_local_output=False), False, "colwise"),
        (ColwiseParallel(output_layouts=Replicate()), False, "colwise_gather_output"),
        (ColwiseParallel(output_layouts=Replicate()), True, "embedding_colwise"),
        (RowwiseParallel(), False, "rowwise"),
        (RowwiseParallel(input_layouts=Replicate()), False, "rowwise_split_input"),
        (RowwiseParallel(input_layouts=Replicate()), True, "embedding_rowwise"),
        (PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()), False, "replicate"),
        ("packed_colwise", False, "packed_colwise"),
    ],
)
def test_torch_styles_with_an_equivalent(style: ParallelStyle | str, is_embedding: bool, name: str) -> None:
    assert name_of_style(style, "rule", is_embedding) == name


class OwnStyle(ColwiseParallel):
    """Subclasses may do anything."""


@pytest.mark.parametrize(
    "style",
    [
        ColwiseParallel(input_layouts=Shard(1)),
        RowwiseParallel(output_layouts=Shard(1)),
        SequenceParallel(),
        PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
        OwnStyle(),
    ],
    ids=lambda style: type(style).__name__,
)
def test_torch_styles_without_an_equivalent(style: ParallelStyle) -> None:
    with pytest.raises(ValueError, match=rf"'model.norm' the torch style {type(style).__name__}"):
        select_plan(build_llama(), {"model.norm": style})


TRANSLATED = {
    "colwise": ColwiseParallel,
    "interleaved_colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": ColwiseParallel,
    "colwise_rep": ColwiseParallel,
    "rowwise_rep": RowwiseParallel,
    "rowwise_split_input": RowwiseParallel,
    "embedding_rowwise": RowwiseParallel,
    "embedding_colwise": ColwiseParallel,
    "replicated_with_grad_allreduce": ReplicatedWithGradAllReduce,
}


@pytest.mark.parametrize("name", STYLES)
def test_translation_of_style_names(name: str) -> None:
    if name in TRANSLATED:
        assert type(translate_to_torch_parallel_style(name)) is TRANSLATED[name]
    else:
        with pytest.raises(ValueError, match=f"no ParallelStyle that does what '{name}' does"):
            translate_to_torch_parallel_style(name)


def test_translation_of_an_unknown_name() -> None:
    with pytest.raises(ValueError, match="'columnwise' is not a style"):
        translate_to_torch_parallel_style("columnwise")


def test_plans_that_torch_cannot_apply() -> None:
    with pytest.raises(ValueError, match="OPTForCausalLM publishes no tensor-parallel plan"):
        get_hf_tp_shard_plan(build_opt())
    with pytest.raises(ValueError, match=r"styles that torch lacks: {.*kv_a_proj_with_mqa': 'mla_kv_a_proj'"):
        get_hf_tp_shard_plan(tiny_model("deepseek_v2"))


def gradients_by_torch(family: str) -> float:
    """Runs on each rank: difference of logits and all gradients after torch's own parallelization with the plan."""
    model, ids = tiny_model(family), torch.arange(3, 27)[None]
    whole = copy.deepcopy(model)
    expected = whole(ids).logits
    expected.square().mean().backward()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, get_hf_tp_plan(model))
    model.tie_weights()
    logits = model(ids).logits
    assert logits.placements == (Shard(2),)
    logits.full_tensor().square().mean().backward()
    differences = [(logits.full_tensor() - expected).abs().max().item()]
    for (name, one), (_, other) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if other.grad is not None:
            found = one.grad.full_tensor() if isinstance(one.grad, DTensor) else one.grad
            differences.append(((found - other.grad).norm() / other.grad.norm().clamp(min=1e-12)).item())
    embedding = model.get_input_embeddings().weight
    assert isinstance(embedding, DTensor)
    assert embedding.placements == (Shard(0),)
    return max(differences)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "qwen3_moe", "mixtral"])
def test_the_plan_in_torch_styles_works_with_torch(pool2: Pool, family: str) -> None:
    assert max(pool2.run(gradients_by_torch, family)) < 1e-4


# ---- code of the hub -------------------------------------------------------------------------------------------------


class DeciLMConfig(LlamaConfig):
    """As that of the hub's code: no plan, and what a search chose for each layer."""

    model_type = "nemotron-nas"
    base_model_tp_plan = None


class DeciLMForCausalLM(LlamaForCausalLM):
    """A Llama of which each layer has heads of its own number, and the second no feed-forward."""

    config_class = DeciLMConfig
    _tp_plan = None


class NoFeedForward(nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(hidden)


def build_nemotron_nas() -> nn.Module:
    torch.manual_seed(0)
    config = DeciLMConfig(**build_llama().config.to_diff_dict() | {"model_type": "nemotron-nas"})
    groups = [2, 4, *[2] * (config.num_hidden_layers - 2)]
    config.block_configs = [{"attention": {"n_heads_in_group": groups[i]}} for i in range(config.num_hidden_layers)]
    model = DeciLMForCausalLM(config)
    for i, layer in enumerate(model.model.layers):
        own = copy.deepcopy(config)
        own.num_key_value_heads = config.num_attention_heads // groups[i]
        layer.self_attn = LlamaAttention(own, i)
    model.model.layers[1].mlp = NoFeedForward()
    return model


def error_of_nemotron_nas() -> tuple[float, str]:
    """Runs on each rank."""
    return compare(build_nemotron_nas, {"tp": 2}, 2, SCHEDULE, make_parallel=parallelize).largest


def test_nemotron_nas_has_a_plan(pool2: Pool) -> None:
    embedding = {"model.embed_tokens": "embedding_rowwise"}
    assert known_rules(build_nemotron_nas()) == {**embedding, **ADDITIONS["DeciLMForCausalLM"]}
    for error, where in pool2.run(error_of_nemotron_nas):
        assert error <= BOUND, where
