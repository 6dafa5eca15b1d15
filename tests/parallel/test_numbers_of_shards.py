"""Numbers that code of users takes of sharded parameters and gradients are those of the whole tensors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lightning_automodel.testing.pool import Pool
from tests.support.marks import OLD_FSDP2

OF_ONE: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(),
    "product": lambda x: x.prod(),
    "largest": lambda x: x.max(),
    "smallest": lambda x: x.min(),
    "deviation": lambda x: x.std(),
    "norm": lambda x: x.norm(),
    "norm of columns": lambda x: x.norm(dim=0)[:2],
    "norm of rows": lambda x: x.norm(dim=1)[:2],
    "1-norm": lambda x: x.norm(1),
    "3-norm": lambda x: x.norm(3),
    "largest absolute": lambda x: x.norm(float("inf")),
    "largest of columns": lambda x: x.amax(0)[:2],
    "smallest of rows": lambda x: x.amin(1)[:2],
    "some": lambda x: (x > 1).any().float(),
    "some of columns": lambda x: (x > 1).any(0).float()[:2],
    "some of rows": lambda x: (x > 1).any(1).float()[:2],
    "all": lambda x: (x > -1).all() * 3.0,
    "all of columns": lambda x: (x > -1).all(0)[:2] * 3.0,
    "count": lambda x: (x > 0).sum(),
    **({} if OLD_FSDP2 else {"place": lambda x: x.argmax()}),  # torch 2.11 fails over gloo
    "sum of exponentials": lambda x: x.logsumexp(0)[:2],
}
OF_TWO: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "first": lambda a, b: a,
    "negative": lambda a, b: -a,
    "inverse": lambda a, b: 1 / (a + 9),
    "together": lambda a, b: torch.stack([a, b]),
    "sum of both": lambda a, b: torch.stack([a, b]).sum(),
    "sum one by one": lambda a, b: torch.stack([a, b]).sum(0),
    "sum of a row": lambda a, b: torch.cat([a.reshape(-1), b.reshape(-1)]).sum(),
    "sum of all": lambda a, b: a.reshape(-1).sum(),
    "mean of both": lambda a, b: torch.stack([a, b]).double().mean(),
    "norm of both": lambda a, b: torch.stack([a, b]).double().norm(),
    "larger": lambda a, b: torch.maximum(a, b),
    "ratio": lambda a, b: a / (b + 9),
    "product of both": lambda a, b: a * b,
    "by hand": lambda a, b: (a**2 + b**2) ** 0.5,
}


def wrong_numbers() -> dict[str, tuple[list[float], list[float]]]:
    """Runs on a rank: what is taken of shards, and of the whole tensors, where these are not the same."""
    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(5, 3, generator=generator), torch.randn(7, 2, generator=generator)]
    shards: Any = [distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in whole]
    wrong = {}
    for name, of_one in OF_ONE.items():
        for use, of_two in OF_TWO.items():
            expected, found = of_two(*map(of_one, whole)), of_two(*map(of_one, shards))
            found = found.full_tensor() if isinstance(found, DTensor) else found
            if not torch.allclose(found.double(), expected.double(), rtol=1e-5, atol=1e-6):
                wrong[f"{name}: {use}"] = (found.tolist(), expected.tolist())
    return wrong


@pytest.mark.slow
def test_they_are_those_of_whole_tensors(pool2: Pool) -> None:
    assert pool2.run(wrong_numbers) == [{}, {}]
