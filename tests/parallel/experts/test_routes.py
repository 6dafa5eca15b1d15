"""Tokens that travel, over any routes: values and all gradients of what one process computes, and no rank waits."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_automodel.parallel.experts.dispatch import dispatch, find_routes, sharing_gradients
from lightning_automodel.plans.experts import Owners
from lightning_automodel.testing.pool import Pool

WIDTH = 5
Case = dict[str, Any]


@st.composite
def cases(draw: Any, ranks: int = 4) -> Case:
    """Numbers of experts, routes per token, and which experts the tokens of each rank choose from."""
    efsdp = draw(st.sampled_from([1, 2]))
    number = ranks * efsdp * draw(st.integers(1, 3))
    k = draw(st.integers(1, min(4, number)))
    tokens = [draw(st.integers(0, 7)) for _ in range(ranks)]
    chosen = draw(st.sampled_from(["any", "first", "last", "one rank's"]))
    return {"number": number, "efsdp": efsdp, "k": k, "tokens": tokens, "chosen": chosen, "seed": draw(st.integers())}


def routes(case: Case, rank: int, generator: torch.Generator) -> Tensor:
    """Different experts for each token: [tokens, k]."""
    number, k = case["number"], case["k"]
    scores = torch.rand(case["tokens"][rank], number, generator=generator)
    favourite = {"any": [], "first": [0], "last": [number - 1], "one rank's": range(min(2, number))}[case["chosen"]]
    scores[:, list(favourite)] += 2
    return scores.topk(k, dim=1).indices


def largest_error(case: Case) -> float:
    """Runs on each rank: outputs and gradients against all experts here, and the tokens of all ranks."""
    group = dist.group.WORLD
    assert group is not None
    owners, rank = Owners(case["number"], group.size(), case["efsdp"]), group.rank()
    mine = owners.of_rank(rank)
    generator = torch.Generator().manual_seed(case["seed"] % 2**60)
    matrices = torch.randn(case["number"], WIDTH, WIDTH, generator=generator)
    inputs = []
    for r in range(group.size()):
        hidden = torch.randn(case["tokens"][r], WIDTH, generator=generator)
        index = routes(case, r, generator)
        inputs.append((hidden.requires_grad_(), index, torch.rand(index.shape, generator=generator).requires_grad_()))

    whole = matrices.clone().requires_grad_()
    expected = [
        torch.einsum("tk,tko->to", w, torch.einsum("ti,tkoi->tko", x, whole[index]).sigmoid()) for x, index, w in inputs
    ]
    of_rank = [
        value.detach().clone().requires_grad_() if value.is_floating_point() else value for value in inputs[rank]
    ]
    hidden, index, weights = of_rank
    local = matrices[mine].clone().requires_grad_()
    run = lambda rows, ids: torch.einsum("ni,noi->no", rows, local[ids]).sigmoid()  # noqa: E731
    run = sharing_gradients(run, group.size())
    actual = dispatch(hidden, weights, run, find_routes(index, owners.places(), group), group)

    torch.stack([(y * y).sum() for y in expected]).sum().backward()
    (actual * actual).sum().backward()
    assert local.grad is not None  # also where no row came
    assert whole.grad is not None
    pairs = [
        (actual, expected[rank]),
        (hidden.grad, inputs[rank][0].grad),
        (weights.grad, inputs[rank][2].grad),
        (local.grad * group.size(), whole.grad[mine]),
    ]
    return max(float((one - other).abs().max()) for one, other in pairs if one is not None and one.numel())


def largest_errors(drawn: list[Case]) -> list[float]:
    """Runs on each rank: of each case."""
    return [largest_error(case) for case in drawn]


@pytest.mark.slow
def test_any_routes_give_the_numbers_of_one_process(pool4: Pool) -> None:
    drawn: list[Case] = []

    @settings(max_examples=60, database=None, deadline=None, derandomize=True)
    @given(case=cases())
    def draw(case: Case) -> None:
        drawn.append(case)

    draw()
    assert {case["chosen"] for case in drawn} == {"any", "first", "last", "one rank's"}
    assert any(0 in case["tokens"] for case in drawn)
    for errors in pool4.run(largest_errors, drawn):
        assert {str(case): error for case, error in zip(drawn, errors, strict=True) if error > 1e-5} == {}


def same_step_twice() -> bool:
    """Runs on each rank: equal runs give equal bits."""
    group = dist.group.WORLD
    assert group is not None
    results = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(group.rank())
        hidden = torch.randn(9, WIDTH, generator=generator, requires_grad=True)
        index = torch.rand(9, 8, generator=generator).topk(2).indices
        weights = torch.rand(9, 2, generator=generator)
        places = Owners(8, group.size()).places()
        found = find_routes(index, places, group)
        output = dispatch(hidden, weights, lambda rows, ids: rows * (ids + 1).unsqueeze(1), found, group)
        output.square().sum().backward()
        results.append((output.detach(), hidden.grad))
    return all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_equal_runs_give_equal_bits(pool4: Pool) -> None:
    assert all(pool4.run(same_step_twice))
