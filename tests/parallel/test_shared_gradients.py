"""Terms of one sum have one gradient, which autograd hands to each: what is added to it belongs to one of them."""

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional

from lightning_automodel.config import FSDP2Config
from lightning_automodel.plans.torch_styles import ReplicatedWithGradAllReduce
from lightning_automodel.testing.pool import Nursery, Pool
from tests.plans.support import BOUND, SCHEDULE
from tests.plans.test_partial_sums import SUMS, Composed, build
from tests.strategies.users.test_own_code import Noted, check_gradients
from tests.support.comparison import compare
from tests.support.marks import with_long
from tests.support.training import HIDDEN, batches, make_trainer, tiny_llama, whole, world_size


def error() -> tuple[float, str]:
    """Runs on each rank; the gradients of the first micro-batch wait, and those of the second are added to them."""
    config = FSDP2Config(tp_plan=SUMS[Composed])
    return compare(partial(build, Composed), {"dp_shard": 2, "tp": 2}, 4, SCHEDULE, config).largest


@pytest.mark.slow
def test_gradients_that_wait_for_their_reduction(pool4: Pool) -> None:
    for found, name in pool4.run(error):
        assert found <= BOUND, name


# ---- torch's own ways from a parameter to what computes --------------------------------------------------------------


class Twins(nn.Module):
    """Two matrices, or two vectors, that are used as their sum."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.randn(shape)), nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.one + self.other)


def furthest(sizes: tuple[int, int]) -> float:
    """Runs on each rank: the largest difference of a gradient after three micro-batches, a part of each."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    one: Any = Twins(8)
    samples = torch.randn(3, 2, dist.get_world_size(), 8)
    many: Any = parallelize_module(copy.deepcopy(one), mesh["tp"], ReplicatedWithGradAllReduce())
    if sizes[0] > 1:
        fully_shard(many, mesh=mesh["dp"])
        many.set_requires_gradient_sync(False)
    for x in samples:
        one(x).square().sum().backward()
        many(x[:, dist.get_rank()]).square().sum().backward()
    if sizes[0] > 1:
        many.set_requires_gradient_sync(True)
        (0 * many(samples[0, :, 0]).sum()).backward()
    pairs = zip(many.parameters(), one.parameters(), strict=True)
    return max(
        float((sizes[0] * whole(p.grad) - whole(q.grad)).abs().max() / whole(q.grad).abs().max()) for p, q in pairs
    )


@pytest.mark.parametrize("sizes", [(1, 2), (2, 2)])
def test_the_style_for_torchs_parallelize_module(sizes: tuple[int, int], nursery: Nursery) -> None:
    for found in Pool(nursery, math.prod(sizes)).run(furthest, sizes):
        assert found <= BOUND


def moved(parameter: DTensor) -> DTensor:
    return parameter.redistribute(placements=[Replicate()] * parameter.device_mesh.ndim)


WAYS: dict[str, Callable[[DTensor, DTensor], Tensor]] = {
    "full_tensor": lambda one, other: one.full_tensor() + other.full_tensor(),
    "to_local": lambda one, other: one.to_local() + other.to_local(),
    "redistribute, to_local": lambda one, other: moved(one).to_local() + moved(other).to_local(),
    "a sum of what was moved": lambda one, other: (moved(one) + moved(other)).to_local(),
}


class ReadsTwins(Noted):
    """Computes with whole parameters itself."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = WAYS[way]

    def change(self) -> None:
        torch.manual_seed(0)
        self.matrices, self.vectors = Twins(6, HIDDEN), Twins(HIDDEN)

    def loss(self, batch: list[Tensor]) -> Tensor:
        output = self.model(input_ids=batch[0], labels=batch[0], output_hidden_states=True)
        matrix, vector = map(self.sum_of, (self.matrices, self.vectors))
        one = self.vectors.one
        alone = one.full_tensor() if isinstance(one, DTensor) else one
        return output.loss + ((output.hidden_states[-1] * vector) @ matrix.T).square().mean() + alone.sum()

    def sum_of(self, twins: Twins) -> Tensor:
        one, other = twins.one, twins.other
        return self.way(one, other) if isinstance(one, DTensor) else one + other


def gradients_of_twins(strategy: Any, way: str) -> list[dict[str, Tensor]]:
    """Runs on each rank: Lightning's own strategy for one device, or ours."""
    module = ReadsTwins(way)
    data = world_size() if strategy == {} else 1
    make_trainer(strategy, max_epochs=1, accumulate_grad_batches=2, gradient_clip_val=0.1).fit(module, batches(data))
    return module.gradients


@pytest.mark.slow
@pytest.mark.parametrize("way", with_long(WAYS, *list(WAYS)[1:]))
def test_whole_parameters_of_users(way: str, nursery: Nursery, pool2: Pool) -> None:
    (expected,) = Pool(nursery, 1).run(gradients_of_twins, "auto", way, trainer=True)
    for sizes in ({"tp": 2}, {}) if way != "to_local" else ({"tp": 2},):  # over data ranks it is a part
        for actual in pool2.run(gradients_of_twins, sizes, way, trainer=True):
            for one, many in zip(expected, actual, strict=True):
                check_gradients(one, many)


class Penalized(Noted):
    """A penalty on what has fewer rows than ranks, by sums over shards.

    Args:
        first: autograd comes to the penalty before FSDP2 reduces the layer, whose inputs need no gradient.
    """

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first = first

    def configure_model(self) -> None:
        super().configure_model()
        torch.manual_seed(0)
        self.value = nn.Linear(HIDDEN, 1)

    def loss(self, batch: list[Tensor]) -> Tensor:
        penalty: Any = sum(parameter.square().sum() for parameter in self.value.parameters())
        output = self.model(input_ids=batch[0], labels=batch[0], output_hidden_states=True)
        features = output.hidden_states[-1]
        values = self.value(features.detach() if self.first else features).square().mean()
        return output.loss + values + (penalty.full_tensor() if isinstance(penalty, DTensor) else penalty)


def gradients_of_penalized(strategy: Any, first: bool) -> list[dict[str, Tensor]]:
    """Runs on each rank."""
    module = Penalized(first)
    make_trainer(strategy, max_epochs=1, accumulate_grad_batches=2).fit(module, batches(world_size()))
    return module.gradients


@pytest.mark.parametrize("first", [True, False])
def test_a_penalty_on_fewer_rows_than_ranks(first: bool, nursery: Nursery, pool2: Pool) -> None:
    (expected,) = Pool(nursery, 1).run(gradients_of_penalized, "auto", first, trainer=True)
    for actual in pool2.run(gradients_of_penalized, {}, first, trainer=True):
        for one, many in zip(expected, actual, strict=True):
            check_gradients(one, many)


class EmbedsItself(Noted):
    """Looks its tokens up in front of the model, which does not use its embedding: the gradient comes last."""

    def configure_model(self) -> None:
        if self.model is None:
            self.model = tiny_llama(tied=False)

    def loss(self, batch: list[Tensor]) -> Tensor:
        table = self.model.get_input_embeddings().weight
        table = table.full_tensor() if isinstance(table, DTensor) else table
        # twice: the second reduction of the step finds what the first backward pass gave
        halves = (batch[0][:, :3], batch[0][:, 3:])
        return sum(self.model(inputs_embeds=functional.embedding(ids, table), labels=ids).loss for ids in halves)


def gradients_of_embedding(strategy: Any, accumulated: int) -> list[dict[str, Tensor]]:
    """Runs on each rank."""
    module = EmbedsItself()
    make_trainer(strategy, max_epochs=1, accumulate_grad_batches=accumulated).fit(module, batches(world_size()))
    return module.gradients


@pytest.mark.slow
@pytest.mark.parametrize("accumulated", [1, 2])
def test_what_only_its_user_computes_with(accumulated: int, nursery: Nursery, pool2: Pool) -> None:
    (expected,) = Pool(nursery, 1).run(gradients_of_embedding, "auto", accumulated, trainer=True)
    assert "model.model.embed_tokens.weight" in expected[0]
    for actual in pool2.run(gradients_of_embedding, {}, accumulated, trainer=True):
        for one, many in zip(expected, actual, strict=True):
            check_gradients(one, many)
