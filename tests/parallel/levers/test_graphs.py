"""Collectives inside of a compiled graph: values and gradients are those outside of one."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_automodel.distributed import collectives
from lightning_automodel.testing.pool import Pool

Step = Callable[[Tensor, Tensor], Tensor]


def in_graphs() -> dict[str, float]:
    """Runs on each rank: the largest error of a value or gradient, by collective."""
    group, ranks = dist.group.WORLD, dist.get_world_size()
    assert group is not None
    cases: dict[str, Step] = {
        "copy_in": lambda x, w: collectives.copy_in(2 * x, group) @ w,
        "reduce_out": lambda x, w: collectives.reduce_out(x @ w, group),
        "gather": lambda x, w: collectives.gather(x @ w, 0, 4 * ranks, group),
        "split": lambda x, w: collectives.split(x, 0, group) @ w,
        "gather_in": lambda x, w: collectives.gather_in(x, 0, 4 * ranks, group) @ w,
        "scatter_out": lambda x, w: collectives.scatter_out(x @ w, 0, group),
    }
    inputs = torch.randn(4, 4), torch.randn(4, 4) * (1 + group.rank())
    return {name: error_of(case, inputs) for name, case in cases.items()}


def error_of(case: Step, inputs: tuple[Tensor, Tensor]) -> float:
    found = []
    for function in (case, torch.compile(case, backend="aot_eager")):
        own = [x.clone().requires_grad_() for x in inputs]
        loss = function(*own).square().sum()
        loss.backward()
        found.append([loss.detach(), *(x.grad for x in own)])
    return max(float((one - two).abs().max()) for one, two in zip(*found, strict=True))


@pytest.mark.slow
def test_collectives_in_a_graph(pool2: Pool) -> None:
    for errors in pool2.run(in_graphs):
        assert max(errors.values()) < 1e-4, errors
