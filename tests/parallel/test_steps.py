"""A backward pass through what a graph computed before a step is an error, as of one process; nothing else is."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_automodel.config import FSDP2Config
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.testing.pool import Nursery, Pool
from tests.parallel.test_in_place import NARROW
from tests.support.training import rows, tiny_llama, whole

IDS, OTHERS = rows(2), rows(2).flip(0)
POLICIES: dict[str, dict[str, Any]] = {"as they are": {}, "held by FSDP2": {"mp_policy": NARROW}}
CHANGED = "modified by an inplace operation"


def made_parallel(model: nn.Module, sizes: dict[str, int] | None, policy: str = "as they are") -> Any:
    if sizes is None:
        return model
    ranks = math.prod(sizes.values())
    return parallelize(model, build_mesh(resolve_sizes(ranks, **sizes), "cpu"), FSDP2Config(), **POLICIES[policy])


def loss_of(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids, labels=ids).loss


def stale(sizes: dict[str, int] | None, policy: str, between: bool) -> str:
    """Runs on each rank, or as one process: what the backward pass says, perhaps ``between`` other passes."""
    model = made_parallel(tiny_llama(tied=False), sizes, policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = loss_of(model, IDS)
    loss_of(model, OTHERS).backward()
    optimizer.step()
    if between:
        loss_of(model, OTHERS).backward()
    try:
        before.backward()
    except RuntimeError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("sizes", [{"dp_shard": 2}, {"tp": 2}], ids=str)
def test_two_ranks(sizes: dict[str, int], policy: str, between: bool, pool2: Pool) -> None:
    assert CHANGED in stale(None, policy, between)
    for found in pool2.run(stale, sizes, policy, between):
        assert CHANGED in found


@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_one_rank(policy: str, between: bool, nursery: Nursery) -> None:
    (found,) = Pool(nursery, 1).run(stale, {}, policy, between)
    assert CHANGED in found


class Heads(nn.Module):
    """Two heads on layers, each with an optimizer; what both are computed from has one, too."""

    def __init__(self) -> None:
        super().__init__()
        self.body = tiny_llama(tied=False)
        self.first, self.second = (nn.Linear(self.body.config.hidden_size, 3) for _ in range(2))

    def forward(self, ids: Tensor) -> list[Tensor]:
        states = self.body.model(input_ids=ids).last_hidden_state
        return [head(states).square().mean() for head in (self.first, self.second)]


def in_turns(sizes: dict[str, int] | None) -> list[Tensor]:
    """Runs on each rank, or as one process: the first head is stepped while the loss of the second one waits."""
    torch.manual_seed(1)
    model = made_parallel(Heads(), sizes)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.5) for part in (model.first, model.second, model.body)]
    for _ in range(2):
        losses = model(IDS)
        for loss, optimizer in zip(losses, optimizers, strict=False):
            loss.backward(retain_graph=loss is losses[0])
            optimizer.step()
        optimizers[-1].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return [whole(parameter).detach() for parameter in model.parameters()]


def test_what_did_not_change_can_be_used(pool2: Pool) -> None:
    expected = in_turns(None)
    for found in pool2.run(in_turns, {"dp_shard": 2}):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def not_needed(sizes: dict[str, int] | None) -> list[Tensor]:
    """Runs on each rank, or as one process: an embedding is stepped between two backward passes through a graph
    that does not need its values.
    """
    torch.manual_seed(1)
    model = tiny_llama(tied=False)
    model = made_parallel(model, sizes)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.5) for part in (model.model.embed_tokens, model.lm_head)]
    for _ in range(2):
        output = model(input_ids=IDS, labels=IDS)
        for loss in (output.loss, output.logits.square().mean()):
            loss.backward(retain_graph=loss is output.loss)
            optimizers[0].step()
        optimizers[1].step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return [whole(parameter).detach() for parameter in model.parameters()]


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"dp_shard": 2, "tp": 2}], ids=str)
def test_what_no_backward_pass_needs_may_change(sizes: dict[str, int], pool2: Pool, pool4: Pool) -> None:
    expected = not_needed(None)
    for found in (pool4 if "dp_shard" in sizes else pool2).run(not_needed, sizes):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
