"""Layers that each rank goes through as often as its own samples say: the gradients of one process."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_automodel import parallelize
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.testing.pool import Nursery, Pool
from tests.support.training import whole

TIMES = ((1, 3), (2, 1), (3, 2))  # of each rank, by step


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(self.wide(x).tanh())


class Deepens(nn.Module):
    """Goes through its layers again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor, times: int) -> Tensor:
        x = self.first(x)
        for _ in range(times):
            for layer in self.layers:
                x = layer(x)
        return self.last(x)


class Halts(Deepens):
    """Goes on for as long as a count says."""

    def forward(self, x: Tensor, times: int) -> Tensor:
        x = self.first(x)
        while times > 0:
            x = self.layers[1](self.layers[0](x))
            times -= 1
        return self.last(self.layers[2](x))


class Looks(Deepens):
    """Passes a list, by a method of its own."""

    def forward(self, x: Tensor, times: int) -> Tensor:
        return self.last(sum(self.encode(part) for part in [self.first(x)] * times))

    def encode(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def gradients(kind: type[Deepens], sizes: dict[str, int] | None) -> list[list[Tensor]]:
    """Runs on each rank, or on one process with the samples of both: those of each step."""
    torch.manual_seed(0)
    model: Any = kind()
    x = torch.randn(len(TIMES), 2, 4, 8)
    if sizes is not None:
        model = parallelize(model, build_mesh(resolve_sizes(2, **sizes), "cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ranks = (0, 1) if sizes is None else (dist.get_rank(),)
    found = []
    for samples, times in zip(x, TIMES, strict=True):
        losses = [model(samples[rank], times[rank]).square().mean() for rank in ranks]
        torch.stack(losses).mean().backward()
        found.append([whole(p.grad) for p in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("kind", [Deepens, Halts, Looks])
def test_ranks_may_differ_in_depth(kind: type[Deepens], nursery: Nursery, pool2: Pool) -> None:
    (expected,) = Pool(nursery, 1).run(gradients, kind, None)
    for found in pool2.run(gradients, kind, {"dp_shard": 2}):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
