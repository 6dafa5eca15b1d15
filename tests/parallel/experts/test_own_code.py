"""Experts that a user changed: hooks around them stay exact, and rows that depend on other rows are refused."""

from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_automodel.parallel.experts.check import check_experts
from lightning_automodel.plans.experts import find_experts
from lightning_automodel.testing.pool import Pool
from tests.parallel.experts.test_exact import EIGHT
from tests.parallel.experts.test_field_bugs import BOUND, Pair
from tests.support.families import tiny_model

Forward = Callable[..., Tensor]


def all_experts(model: nn.Module) -> list[nn.Module]:
    return [module for name, module in model.named_modules() if name.endswith(".experts")]


def with_a_capacity(inner: Forward, only_in_training: bool = False) -> Forward:
    """Drops what comes to an expert beyond a fifth more than its share."""

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        routes = functional.one_hot(top_k_index, self.num_experts).flatten(0, 1)
        place = (routes.cumsum(0) * routes).sum(-1).view_as(top_k_index)
        capacity = 1.2 * top_k_index.numel() / self.num_experts
        kept = (place <= capacity) | (only_in_training and not self.training)
        return inner(hidden_states, top_k_index, top_k_weights * kept)

    return forward


def dropping_in_training(inner: Forward) -> Forward:
    return with_a_capacity(inner, only_in_training=True)


def centred(inner: Forward) -> Forward:
    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return inner(hidden_states - hidden_states.mean(0), top_k_index, top_k_weights)

    return forward


@pytest.mark.parametrize("change", [with_a_capacity, dropping_in_training, centred])
def test_rows_that_depend_on_others(change: Callable[[Forward], Forward]) -> None:
    model = tiny_model("qwen3_moe", **EIGHT)
    last = all_experts(model)[-1]
    last.forward = MethodType(change(last.forward), last)
    with pytest.raises(
        ValueError, match=r"layers\.1\.mlp\.experts \(Qwen3MoeExperts\) returns is not the sum .*; use ep=1"
    ):
        check_experts(model, find_experts(model, 2, 2).values(), "use ep=1")


def test_dropout_and_what_a_pass_keeps_are_left_alone() -> None:
    model = tiny_model("qwen3_moe", **EIGHT)
    last = all_experts(model)[-1]
    inner = last.forward

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        self.seen = len(hidden_states)
        return functional.dropout(inner(hidden_states, top_k_index, top_k_weights), 0.5, self.training)

    last.forward = MethodType(forward, last)
    state = torch.get_rng_state()
    check_experts(model.train(), find_experts(model, 2, 2).values(), "use ep=1")
    assert torch.equal(torch.get_rng_state(), state)
    assert not hasattr(last, "seen")
    assert (last.training, last.num_experts) == (True, 8)


def hook_around(model: nn.Module) -> None:
    for module in all_experts(model):
        module.register_forward_pre_hook(lambda _, args: (args[0] * 2, args[1], args[2] ** 2))
        module.register_forward_hook(lambda _, args, output: (output + output.mean(0)).tanh())


def hooked() -> tuple[float, str]:
    """Runs on each rank."""
    return Pair(hook_around).run()


def test_hooks_around_experts(pool4: Pool) -> None:
    for error, name in pool4.run(hooked):
        assert error < BOUND, name
