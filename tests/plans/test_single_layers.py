"""Linear layers of which nothing tells what belongs together: each gives all features, and a rank stores its part."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.nn.utils import parametrize
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.bamba.modeling_bamba import BambaMixer

from lightning_automodel import FSDP2Config
from lightning_automodel.plans import derive_layout, select_plan
from lightning_automodel.plans.selection import known_rules
from lightning_automodel.testing.pool import Pool
from tests.support.comparison import Schedule, compare
from tests.support.families import tiny_model
from tests.support.float64 import in_float64
from tests.support.marks import with_slow

BOUND = 1e-10
SCHEDULE = Schedule(steps=2, micro_batches=2, clip=0.5)
GATHERED = "colwise_gather_output"


class Added(nn.Module):
    """A user's layers, beside those of a block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(hidden) * self.down.weight.norm()


def added() -> nn.Module:
    """A module of a user's in each feed-forward."""
    model: Any = tiny_model("llama")
    for layer in model.model.layers:
        layer.post_attention_layernorm = nn.Sequential(layer.post_attention_layernorm, Added(96))
    return model


PER_LAYER = {"hidden_size_per_layer_input": 64}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "mamba": (partial(tiny_model, "mamba"), {}),
    "mamba2": (partial(tiny_model, "mamba2"), {"activation_checkpointing": True}),
    "rwkv": (partial(tiny_model, "rwkv"), {}),
    "xlstm": (partial(tiny_model, "xlstm"), {}),
    "hybrid": (partial(tiny_model, "bamba", num_hidden_layers=4), {"sequence_parallel": True}),
    "compiled": (partial(tiny_model, "lfm3"), {"enable_compile": True, "compile_backend": "aot_eager"}),
    "experts without a plan": (partial(tiny_model, "zaya"), {"sequence_parallel": True}),
    "experts of its own": (partial(tiny_model, "jetmoe"), {}),
    "vectors for each layer": (partial(tiny_model, "gemma3n_text", **PER_LAYER), {"sequence_parallel": True}),
    "the same of gemma 4": (partial(tiny_model, "gemma4_text", **PER_LAYER), {}),
    "a user's module": (added, {}),
}
FAST = ("mamba2", "hybrid", "experts without a plan", "vectors for each layer")
OTHERS = tuple(sorted(CASES.keys() - set(FAST)))


def errors(sizes: dict[str, int], names: tuple[str, ...]) -> dict[str, Any]:
    """Runs on each rank: the largest error of each case that has one, in float64: recurrences amplify rounding."""
    world, found = torch.distributed.get_world_size(), {}
    for name in names:
        build, fields = CASES[name]
        with in_float64():
            found[name] = compare(
                lambda build=build: build().double(), sizes, world, SCHEDULE, FSDP2Config(**fields)
            ).largest
    return {name: error for name, error in found.items() if not error[0] <= BOUND}


@pytest.mark.parametrize("group", with_slow(["few", "others"], "others"))
def test_exact(group: str, pool2: Pool) -> None:
    assert pool2.run(errors, {"tp": 2}, FAST if group == "few" else OTHERS, timeout=240) == [{}, {}]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"dp_shard": 2, "tp": 2}, {"tp": 4}], ids=str)
def test_exact_on_four_ranks(sizes: dict[str, int], pool4: Pool) -> None:
    assert pool4.run(errors, sizes, tuple(CASES), timeout=400) == [{}] * 4


# ---- which layers ----------------------------------------------------------------------------------------------------


def styles(model: nn.Module) -> dict[str, str]:
    """Rules by the names of layers in their blocks."""
    return {rule.rpartition("*.")[2]: style for rule, style in known_rules(model).items()}


@pytest.mark.parametrize(
    ("family", "gathered", "whole"),
    [
        ("mamba2", {"mixer.in_proj"}, {"mixer.out_proj"}),  # whose matrix a fused kernel reads
        ("jamba", {"mamba.in_proj", "mamba.out_proj"}, {"mamba.dt_proj"}),
        ("rwkv", {"attention.receptance", "feed_forward.key"}, set()),
        ("xlstm", {"mlstm_layer.q", "ffn.proj_down"}, {"mlstm_layer.igate_preact"}),  # a number for each head
        ("recurrent_gemma", {"temporal_block.linear_x"}, set()),
        ("big_bird", {"attention.self.query"}, set()),
        ("falcon_h1", {"mamba.in_proj"}, set()),
        ("llava", set(), {"vision_tower"}),
        ("ernie4_5_vl_moe", set(), {"attn.qkv"}),  # of a tower, where the model publishes a plan for its text
    ],
)
def test_which_layers_give_all_features(family: str, gathered: set[str], whole: set[str]) -> None:
    found = styles(tiny_model(family))
    assert {found[name] for name in gathered} <= {GATHERED}
    assert not [rule for rule in found for name in whole if name in rule]


def test_a_rank_stores_its_part_and_what_stands_between_is_whole() -> None:
    layout = derive_layout(model := tiny_model("mamba2"), select_plan(model), 2)
    mixer = "backbone.layers.0.mixer"
    assert layout.parameters[f"{mixer}.in_proj.weight"].placement == Shard(0)
    between = [layout.parameters[f"{mixer}.{name}"] for name in ("A_log", "conv1d.weight", "norm.weight")]
    assert {(p.placement, p.gradient) for p in between} == {(Replicate(), Replicate())}
    assert layout.boundaries == []


class Reading(BambaMixer):
    """A user's, which computes with a matrix itself."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs) * self.in_proj.weight.mean()


def reading() -> nn.Module:
    """A model of transformers with such a mixer."""
    model: Any = tiny_model("bamba")
    mixer = next(module for module in model.modules() if isinstance(module, BambaMixer))
    mixer.__class__ = Reading
    return model


def parametrized() -> nn.Module:
    """A matrix that is computed."""
    model: Any = tiny_model("bamba")
    mixer = next(module for module in model.modules() if isinstance(module, BambaMixer))
    parametrize.register_parametrization(mixer.in_proj, "weight", nn.Identity())
    return model


def shared() -> nn.Module:
    """A matrix in two places."""
    model: Any = tiny_model("bamba", num_hidden_layers=4)
    mixers = [module for module in model.modules() if isinstance(module, BambaMixer)]
    mixers[0].in_proj.weight = mixers[1].in_proj.weight
    return model


def watched() -> nn.Module:
    """Gradients of norm one."""
    model: Any = tiny_model("bamba")
    for mixer in (module for module in model.modules() if isinstance(module, BambaMixer)):
        mixer.in_proj.weight.register_hook(lambda gradient: gradient / gradient.norm())
    return model


@pytest.mark.parametrize(
    ("build", "layers"),
    [
        (reading, {"layers.0.mamba.in_proj"}),
        (parametrized, {"layers.0.mamba.in_proj"}),
        (shared, {"layers.0.mamba.in_proj", "layers.1.mamba.in_proj"}),
        (watched, {"layers.0.mamba.in_proj", "layers.1.mamba.in_proj"}),
        (added, {"layers.0.post_attention_layernorm.1.down", "layers.1.post_attention_layernorm.1.down"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_may_compute_otherwise_stays_whole(build: Any, layers: set[str]) -> None:
    layout = derive_layout(model := build(), select_plan(model), 2)
    for layer in layers:
        placements = {p.placement for name, p in layout.parameters.items() if f"model.{layer}." in name}
        assert placements == {Replicate()}, layer


def test_the_same_layers_of_plain_models_are_split() -> None:
    """Those of the test above, without what may compute otherwise."""
    layout = derive_layout(model := tiny_model("bamba", num_hidden_layers=4), select_plan(model), 2)
    split = [f"model.layers.{layer}.mamba.in_proj.weight" for layer in (0, 1)]
    assert {layout.parameters[name].placement for name in split} == {Shard(0)}


def test_layers_of_few_numbers_stay_whole() -> None:
    assert styles(tiny_model("gemma3n_text", laurel_rank=64))["laurel.linear_left"] == GATHERED
    assert "laurel.linear_left" not in styles(tiny_model("gemma3n_text", laurel_rank=8))


def test_tables_larger_than_that_of_tokens_are_split_by_columns() -> None:
    table = "model.embed_tokens_per_layer"
    assert known_rules(tiny_model("gemma4_text", **PER_LAYER))[table] == "embedding_colwise"
    assert table not in known_rules(tiny_model("gemma4_text", hidden_size_per_layer_input=8))


def test_the_head_of_a_model_inside_is_split() -> None:
    assert known_rules(tiny_model("nemotron_h_omni"))["language_model.lm_head"] == GATHERED


def test_where_layers_have_their_own_numbers_of_heads() -> None:
    """dots3_note has layers of latent attention, and others."""
    config = CONFIG_MAPPING["dots3_note_text"](num_hidden_layers=4)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert derive_layout(model, select_plan(model), 4).boundaries
