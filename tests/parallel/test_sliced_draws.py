"""A run with dropout at tp=2 equals one process's on CPU: whole values, heads, features, and rows of the sequence."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import rrelu, silu

from lightning_automodel.config import FSDP2Config
from lightning_automodel.testing.pool import Pool
from tests.support.comparison import Schedule, compare
from tests.support.families import tiny_model

BOUND = 1e-5
RATES = dict.fromkeys(("attention_dropout", "resid_pdrop", "embd_pdrop", "residual_dropout", "embedding_dropout"), 0.2)
JITTER = {"router_jitter_noise": 0.2, "input_jitter_noise": 0.2}


def errors(cases: list[tuple[str, str, FSDP2Config]], schedule: Schedule) -> list[tuple[float, str]]:
    """Runs on each rank; an odd number of tokens."""
    found = []
    for family, attention, config in cases:
        build = partial(tiny_model, family, attention, **RATES, **JITTER)
        error, where = compare(build, {"tp": 2}, 2, schedule, config).largest
        found.append((error, f"{where} of {family}, {attention}, {config}"))
    return found


CASES = [
    ("phi", "eager", FSDP2Config()),
    ("phi", "sdpa", FSDP2Config(sequence_parallel=True, activation_checkpointing="submodule")),
    ("phi", "sdpa", FSDP2Config(activation_checkpointing=True)),
    ("phi", "sdpa", FSDP2Config(enable_compile=True, compile_backend="aot_eager")),  # not with a graph's own numbers
    ("mixtral", "sdpa", FSDP2Config(sequence_parallel=True)),
    ("phimoe", "eager", FSDP2Config(activation_checkpointing="submodule")),  # writes through a view of what enters
    (
        "minimax",
        "eager",
        FSDP2Config(activation_checkpointing=True),
    ),  # its residual stream is what the router writes to
    ("minimax", "sdpa", FSDP2Config(sequence_parallel=True, activation_checkpointing="submodule")),
    ("longcat_flash", "sdpa", FSDP2Config(sequence_parallel=True)),  # draws behind experts, which look at values
    ("inkling2_text", "eager", FSDP2Config()),  # a kernel that drops nothing runs beside attention that does
    ("minimax", "sdpa", FSDP2Config(enable_compile=True, compile_backend="aot_eager")),
]


@pytest.mark.slow
def test_dropout_is_that_of_one_process(pool2: Pool) -> None:
    for found in pool2.run(errors, CASES, Schedule(steps=1, length=13)):
        assert [where for error, where in found if not error <= BOUND] == []


# ---- draws of a user's own, in the features of a feed-forward --------------------------------------------------------


class Drawing(nn.Module):
    """Stands in the place of an activation.

    Args:
        factor: draws for the value that it is given.
    """

    def __init__(self, factor: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return silu(x) * self.factor(x)


FACTORS: dict[str, Callable[[Tensor], Any]] = {
    "by chances": lambda x: torch.bernoulli(x.detach().sigmoid()),
    "by means": lambda x: torch.normal(x.detach(), torch.full_like(x, 0.1)),
    "counts": lambda x: torch.poisson(x.detach().abs()),
    "integers": lambda x: torch.randint(1, 3, x.shape),
    "normal": lambda x: torch.normal(1.0, 0.1, x.shape),
    "behind a draw on a device of its own": lambda x: torch.rand(x.shape) * x.detach() + torch.rand(x.shape),
    "a number for each feature": lambda x: torch.rand(x.shape[-1]),
    "slopes": lambda x: rrelu(x, training=True),
    "tokens in another order": lambda x: x[:, torch.randperm(x.shape[1])].detach(),
    "of Python": lambda x: random.random(),
}


def with_factors(factor: Callable[[Tensor], Any]) -> nn.Module:
    model: Any = tiny_model("llama")
    for layer in model.model.layers:
        layer.mlp.act_fn = Drawing(factor)
    return model


def errors_of_factors() -> dict[str, float]:
    """Runs on each rank."""
    schedule = Schedule(steps=1, length=13)
    return {
        name: compare(partial(with_factors, factor), {"tp": 2}, 2, schedule).largest[0]
        for name, factor in FACTORS.items()
    }


@pytest.mark.slow
def test_draws_of_users_are_those_of_one_process(pool2: Pool) -> None:
    for found in pool2.run(errors_of_factors):
        assert {name: error for name, error in found.items() if not error <= BOUND} == {}
