"""Selective activation checkpointing: the same numbers, with less kept and more computed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_automodel.config import FSDP2Config
from lightning_automodel.parallelizer import apply_selective_activation_checkpointing, get_lm_ac_layers, parallelize
from lightning_automodel.testing.pool import Nursery, Pool
from tests.exactness.test_composite import build as build_llava
from tests.plans.support import BOUND, SCHEDULE, build_llama
from tests.support.comparison import compare
from tests.support.families import tiny_model
from tests.support.marks import with_long


def before(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    apply_selective_activation_checkpointing(model)
    return parallelize(model, mesh)


def after(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    parallelize(model, mesh, FSDP2Config(sequence_parallel=True))
    model.config.use_cache = True  # type: ignore[union-attr]
    apply_selective_activation_checkpointing(model)
    return model


def experts() -> nn.Module:
    return tiny_model("mixtral")


CASES: dict[str, tuple[Callable, Callable]] = {
    "before": (build_llama, before),
    "after": (build_llama, after),
    "experts": (experts, before),
}


def errors(cases: list[str], world: int) -> dict[str, tuple[float, str]]:
    """Runs on each rank."""
    sizes = {"dp_shard": world // 2, "tp": 2}
    found = {}
    for case in cases:
        build, make = CASES[case]
        found[case] = compare(build, sizes, world, SCHEDULE, make_parallel=make).largest
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "cases"), with_long([(2, ["after", "experts"]), (4, ["before"])], (4, ["before"])), ids=["2", "4"]
)
def test_numbers_are_those_of_one_process(nursery: Nursery, ranks: int, cases: list[str]) -> None:
    for found in Pool(nursery, ranks).run(errors, cases, ranks):
        assert {case: error for case, error in found.items() if error[0] > BOUND} == {}


class Counter(TorchDispatchMode):
    """Counts matrix products and calls of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"mm": 0, "attention": 0}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        self.counts["mm"] += name == "mm"
        self.counts["attention"] += "attention" in name and "backward" not in name
        return function(*args, **(kwargs or {}))


def counts(model: nn.Module) -> dict[str, int]:
    """Of a training step on one process."""
    ids = torch.arange(3, 23)[None]
    with Counter() as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    return counter.counts


def test_every_second_matrix_product_is_computed_again() -> None:
    model = tiny_model("llama", attention="sdpa").train()
    once = counts(model)
    apply_selective_activation_checkpointing(model)
    again = counts(model)
    products = 7 * 2  # of two layers
    assert again["attention"] == once["attention"] > 0
    # The last one before the end of a layer is not needed, so recomputation stops before it.
    assert once["mm"] < again["mm"] <= once["mm"] + products // 2
    model.eval()
    assert counts(model)["mm"] == once["mm"]


def test_blocks_of_the_language_model_only() -> None:
    model = build_llava()
    assert get_lm_ac_layers(model) == list(model.get_submodule("model.language_model.layers"))
