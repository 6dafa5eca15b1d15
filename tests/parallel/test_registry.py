"""Strategies that users register for a class of models: who finds them, and that they are what runs."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from transformers import LlamaForCausalLM

from lightning_automodel import FSDP2Config
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallel.setup import FSDP2Setup
from lightning_automodel.parallelizer import (
    PARALLELIZATION_STRATEGIES,
    DefaultParallelizationStrategy,
    ParallelizationStrategy,
    fsdp2_strategy_parallelize,
    get_parallelization_strategy,
    parallelize,
    register_parallel_strategy,
)
from lightning_automodel.testing.pool import Pool
from tests.plans.support import BOUND, build_llama, build_opt
from tests.support.comparison import Schedule, compare
from tests.support.families import tiny_model
from tests.support.training import Recorder, batches, make_trainer

ENTRIES = {
    "NemotronHForCausalLM",
    "DeepseekV4ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5ForCausalLM",
    "WanTransformer3DModel",
    "HunyuanVideo15Transformer3DModel",
    "LTX2VideoTransformer3DModel",
}


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ParallelizationStrategy]]:
    before = dict(PARALLELIZATION_STRATEGIES)
    yield PARALLELIZATION_STRATEGIES
    PARALLELIZATION_STRATEGIES.clear()
    PARALLELIZATION_STRATEGIES.update(before)


class Recording(DefaultParallelizationStrategy):
    """Keeps what it was given, and changes a switch."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def parallelize(self, model: nn.Module, device_mesh: Any, *args: Any, **kwargs: Any) -> nn.Module:
        self.calls.append(kwargs)
        return super().parallelize(model, device_mesh, *args, **{**kwargs, "reshard_after_forward": True})


def test_entries_and_default(registry: dict[str, ParallelizationStrategy]) -> None:
    assert registry.keys() >= ENTRIES
    assert type(get_parallelization_strategy(build_opt())) is DefaultParallelizationStrategy


def test_forms_of_the_decorator(registry: dict[str, ParallelizationStrategy]) -> None:
    @register_parallel_strategy
    class OPTForCausalLM(Recording): ...

    @register_parallel_strategy(name="LlamaForCausalLM")
    class Named(Recording): ...

    instance = Recording()
    assert register_parallel_strategy(instance, name="Other") is instance
    assert registry["Other"] is instance
    assert type(get_parallelization_strategy(build_opt())) is OPTForCausalLM
    assert type(get_parallelization_strategy(build_llama())) is Named


def test_classes_derived_from_a_registered_one(registry: dict[str, ParallelizationStrategy]) -> None:
    class Mine(LlamaForCausalLM): ...

    register_parallel_strategy(Recording, name="LlamaForCausalLM")
    model = build_llama()
    model.__class__ = type("FSDPMine", (FSDPModule, Mine), {})
    assert type(get_parallelization_strategy(model)) is Recording


def test_checkpointing_where_the_caller_says_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []

    def apply(setup: FSDP2Setup, model: nn.Module, mesh: Any) -> nn.Module:
        found.append(setup.config.activation_checkpointing)
        return model

    monkeypatch.setattr(FSDP2Setup, "apply", apply)
    strategy, given = PARALLELIZATION_STRATEGIES["LTX2VideoTransformer3DModel"], (MixedPrecisionPolicy(), None, False)
    for arguments in (given, (*given, False), (*given, "selective")):
        strategy.parallelize(nn.Linear(2, 2), None, *arguments)
    strategy.parallelize(nn.Linear(2, 2), None, activation_checkpointing=False)
    assert found == [True, False, "selective", False]


def test_what_is_no_strategy() -> None:
    with pytest.raises(ValueError, match="is not a ParallelizationStrategy"):
        register_parallel_strategy(nn.Linear, name="LlamaForCausalLM")


def calls_under_each_entry() -> list[dict[str, Any]]:
    """Runs on each rank."""
    strategy = register_parallel_strategy(Recording(), name="LlamaForCausalLM")
    mesh = build_mesh(resolve_sizes(2, tp=2), "cpu")
    config = FSDP2Config(fsdp2_forward_prefetch_depth=3, mp_policy={"param_dtype": "bfloat16"})
    parallelize(build_llama(), mesh, config, param_dtype=torch.float32)
    own = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard_cp", "tp"))
    fsdp2_strategy_parallelize(build_llama(), own, MixedPrecisionPolicy())
    return [{key: str(value) for key, value in call.items()} for call in strategy.calls]


def test_every_entry_runs_the_registered_strategy(pool2: Pool) -> None:
    under_parallelize, functional = pool2.run(calls_under_each_entry)[0]
    assert "param_dtype=torch.bfloat16" in under_parallelize["mp_policy"]
    assert under_parallelize["param_dtype"] == "torch.float32"
    assert under_parallelize["fsdp2_forward_prefetch_depth"] == "3"
    assert under_parallelize["tp_mesh_name"] == "tp"
    assert functional["fsdp2_backward_prefetch_depth"] == "2"


def calls_of_trainer() -> int:
    """Runs on each rank."""
    strategy = register_parallel_strategy(Recording(), name="LlamaForCausalLM")
    make_trainer({"tp": 2}, max_steps=1, max_epochs=1).fit(Recorder(), batches(1))
    return len(strategy.calls)


def test_the_lightning_strategy_runs_the_registered_strategy(pool2: Pool) -> None:
    assert pool2.run(calls_of_trainer, trainer=True) == [1, 1]


def entry_errors() -> dict[str, tuple[float, str]]:
    """Runs on each rank."""
    families = {"nemotron_h": {}, "deepseek_v4": {}, "qwen3_5_text": {"num_hidden_layers": 4}}
    schedule = Schedule(steps=1, length=12)
    return {
        family: compare(partial(tiny_model, family, **changes), {"tp": 2}, 2, schedule).largest
        for family, changes in families.items()
    }


@pytest.mark.slow
def test_entries_equal_one_process(pool2: Pool) -> None:
    for found in pool2.run(entry_errors):
        assert {family: error for family, error in found.items() if error[0] > 10 * BOUND} == {}
