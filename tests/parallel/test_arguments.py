"""Arguments of a wrong kind: the error names the value, the rule and what to write instead."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel

from lightning_automodel import (
    DDPConfig,
    DDPStrategy,
    FSDP2Config,
    FSDP2TPStrategy,
    MegatronFSDPConfig,
    MegatronFSDPStrategy,
)
from lightning_automodel.distributed import logs
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallelizer import (
    PARALLELIZATION_STRATEGIES,
    DefaultParallelizationStrategy,
    fsdp2_strategy_parallelize,
    get_hf_tp_shard_plan,
    parallelize,
    register_parallel_strategy,
)
from lightning_automodel.testing.pool import Pool
from tests.plans.support import build_llama, build_opt

RULE = "model.layers.*.mlp.up_proj"


@pytest.mark.parametrize(
    ("strategy", "config", "message"),
    [
        (
            FSDP2TPStrategy,
            DDPConfig(),
            r"config is a DDPConfig, and must be a FSDP2Config; use config=FSDP2Config\(\.\.\.",
        ),
        (MegatronFSDPStrategy, FSDP2Config(), "config is a FSDP2Config, and must be a MegatronFSDPConfig"),
        (DDPStrategy, {"chunked_loss": 3}, r"config is a dict, .*; use config=DDPConfig\(\*\*{'chunked_loss': 3}\)"),
    ],
)
def test_configs_of_another_strategy(strategy: Any, config: Any, message: str) -> None:
    """Switches that a class lacks would be off: a MegatronFSDPConfig was taken by FSDP2TPStrategy."""
    with pytest.raises(TypeError, match=message):
        strategy(config=config)


@pytest.mark.parametrize("kind", [FSDP2Config, MegatronFSDPConfig])
@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (3, "tp_plan=3 is a int; use a dict of name pattern to style"),
        ([RULE], "is a list; use a dict .* or the import path of one"),
        ({RULE: ColwiseParallel}, r"or an instance of torch's ParallelStyle: ColwiseParallel\(\)"),
        ({RULE: None}, "a rule is a name pattern and a style, which is a name such as 'colwise'"),
        ({}, "tp_plan={} has no rules; None stands for the model's own plan"),
        ({"extends": "base"}, "the only plan that a plan can extend is the model's own: {'extends': 'model'}"),
        ({3: "colwise"}, "tp_plan={3: 'colwise'}: a rule is a name pattern and a style"),
    ],
    ids=lambda value: "" if isinstance(value, str) else None,
)
def test_plans(kind: Callable, plan: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(tp_plan=plan)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (FSDP2Config, {"sequence_parallel": "yes"}, "sequence_parallel='yes' is neither on nor off; use True or False"),
        (FSDP2Config, {"enable_compile": 1}, "enable_compile=1 is neither"),
        (DDPConfig, {"static_graph": "no"}, "static_graph='no' is neither"),
        (MegatronFSDPConfig, {"disable_bucketing": None}, "disable_bucketing=None is neither"),
        (FSDP2Config, {"mp_policy": "bfloat16"}, r"mp_policy='bfloat16' is no policy; use .* {\"param_dtype\": "),
        (FSDP2Config, {"reshard_after_forward": "yes"}, "reshard_after_forward='yes': use True or False, a number of"),
        (FSDP2Config, {"reshard_after_forward": 0}, "reshard_after_forward=0: use"),
        (FSDP2Config, {"activation_checkpointing": 2}, "activation_checkpointing=2: use True, False, full, selective"),
    ],
    ids=lambda value: "" if isinstance(value, str) else None,
)
def test_fields(kind: Callable, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**fields)


# ---- functions -------------------------------------------------------------------------------------------------------


def test_plans_of_wrappers() -> None:
    with pytest.raises(ValueError, match=r"Sequential is no Hugging Face model, .* get_hf_tp_shard_plan\(model.0\)"):
        get_hf_tp_shard_plan(nn.Sequential(build_llama()))
    with pytest.raises(ValueError, match=r"write one, and give it to fsdp2_strategy_parallelize\(tp_shard_plan"):
        get_hf_tp_shard_plan(build_opt())


def test_a_name_in_the_place_of_a_strategy() -> None:
    with pytest.raises(ValueError, match="the name of a model's class is given as name='LlamaForCausalLM'"):
        register_parallel_strategy("LlamaForCausalLM")


class Forgetful(DefaultParallelizationStrategy):
    """Changes the model and returns nothing."""

    def parallelize(self, *args: Any, **kwargs: Any) -> Any:
        super().parallelize(*args, **kwargs)


def refusals() -> list[str]:
    """Runs on each rank: what is said to a strategy without a result, to a second call, and to a dtype for a policy."""
    mesh = build_mesh(resolve_sizes(2, tp=2), "cpu")
    said = []

    def expect(function: Callable, *args: Any) -> None:
        with pytest.raises(ValueError) as error:  # noqa: PT011
            function(*args)
        said.append(str(error.value))

    register_parallel_strategy(Forgetful, name="LlamaForCausalLM")
    expect(parallelize, build_llama(), mesh)
    del PARALLELIZATION_STRATEGIES["LlamaForCausalLM"]
    model = parallelize(build_llama(), mesh)
    expect(parallelize, model, mesh)
    expect(fsdp2_strategy_parallelize, model, mesh)
    expect(fsdp2_strategy_parallelize, build_llama(), mesh, torch.bfloat16)
    return said


def test_what_a_call_refuses(pool2: Pool) -> None:
    without, again, functional, dtype = pool2.run(refusals)[0]
    assert "Forgetful.parallelize returned None for a LlamaForCausalLM; it must change the model in place" in without
    assert "LlamaForCausalLM was made parallel already (model.embed_tokens.weight is a DTensor)" in again
    assert functional == again
    assert "mp_policy=torch.bfloat16 is no policy" in dtype


def warned() -> list[str]:
    """Runs on each rank: warnings of two models on a mesh that splits no layer."""
    logs._seen.clear()
    mesh = build_mesh(resolve_sizes(2, dp_shard=2), "cpu")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            parallelize(build_llama(), mesh, FSDP2Config(sequence_parallel=True, tp_plan={RULE: "replicate"}))
    return [str(warning.message) for warning in caught if "without effect" in str(warning.message)]


def test_fields_that_one_rank_of_tp_ignores(pool2: Pool) -> None:
    expected = "tp_plan and sequence_parallel of FSDP2Config: without effect, because tp=1 splits no layer"
    assert pool2.run(warned)[0] == [expected]
