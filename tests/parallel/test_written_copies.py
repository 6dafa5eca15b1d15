"""What is written into parameters stays, or is an error: behind a forward pass FSDP2 has copies in their place."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor

from lightning_automodel import parallelize
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.testing.pool import Nursery, Pool
from tests.support.layouts import LAYOUTS
from tests.support.training import VOCABULARY, Descending, batches, make_trainer, tiny_llama, whole

STEPS, ROWS = 3, 4


class Distils(Descending):
    """Learns from a teacher that follows it, and would train for all that it knows.

    Args:
        when: the teacher is averaged, of the passes of a step.
        graph: it is called with one, though no backward pass follows.
    """

    def __init__(self, when: str, graph: bool) -> None:
        super().__init__()
        self.when, self.graph = when, graph
        self.teacher: Any = None

    def configure_model(self) -> None:
        super().configure_model()
        if self.teacher is None:
            self.teacher = tiny_llama()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.when == "before":
            self.average()
        with torch.set_grad_enabled(self.graph):
            expected = self.teacher(batch[0]).logits.detach()
        outputs = self.model(batch[0], labels=batch[0])
        if self.when == "between":
            self.average()
        return outputs.loss + (outputs.logits - expected).square().mean()

    @torch.no_grad()
    def average(self) -> None:
        for old, new in zip(self.teacher.parameters(), self.model.parameters(), strict=True):
            old.lerp_(new, 0.5)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.5)


def distil(when: str, graph: bool, strategy: Any, data_ranks: int) -> dict[str, Tensor]:
    module = Distils(when, graph)
    make_trainer(strategy, max_epochs=1).fit(module, batches(data_ranks))
    return {name: whole(parameter) for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("graph", [True, False])
def test_written_before_the_passes(graph: bool, pool2: Pool) -> None:
    expected = distil("before", graph, SingleDeviceStrategy(torch.device("cpu")), 1)
    for found in pool2.run(distil, "before", graph, {"dp_shard": 2}, 2, trainer=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def refuse(call: Callable[..., Any], *args: Any) -> str:
    with pytest.raises((ValueError, RuntimeError)) as caught:
        call(*args)
    return str(caught.value)


WRITTEN = "model.embed_tokens.weight of LlamaForCausalLM was written into behind a forward pass"
MIXED = "(a momentum encoder, a teacher) belongs before the first forward pass of the step"  # copies and shards meet


@pytest.mark.parametrize(("graph", "words"), [(True, WRITTEN), (False, MIXED)])
def test_written_between_the_passes(graph: bool, words: str, pool2: Pool) -> None:
    """What was written into copies would be lost, which one process keeps."""
    for message in pool2.run(refuse, distil, "between", graph, {"dp_shard": 2}, 2, trainer=True):
        assert words in message


WAYS: dict[str, Callable[[Tensor], Any]] = {
    "in place": lambda parameter: parameter.mul_(0.5),
    "its data": lambda parameter: parameter.data.mul_(0.5),
}


def write(way: str, follows: bool, ranks: int) -> None:
    """Writes into parameters behind a forward pass: from the second time on it is seen in either way."""
    model = parallelize(tiny_llama(), build_mesh(resolve_sizes(ranks, dp_shard=ranks), "cpu"))
    ids = torch.zeros(1, 8, dtype=torch.long)
    for _ in range(3):
        loss = model(ids, labels=ids).loss
        with torch.no_grad():
            for parameter in model.parameters():
                WAYS[way](parameter)
        if follows:
            loss.backward()


@pytest.mark.parametrize("follows", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_written_in_a_loop_of_ones_own(way: str, follows: bool, pool2: Pool) -> None:
    for message in pool2.run(refuse, write, way, follows, 2):
        assert WRITTEN in message


class Writes(Descending):
    """Writes behind the forward pass of an automatic step."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        with torch.no_grad():
            for parameter in self.parameters():
                WAYS[self.way](parameter)
        return loss


def train(way: str, layout: str) -> None:
    make_trainer(LAYOUTS[layout].make(), max_epochs=1).fit(Writes(way), batches(2))


@pytest.mark.parametrize("layout", ["fsdp2-dp2", "megatron1-dp2"])
@pytest.mark.parametrize("way", WAYS)
def test_written_in_a_step(way: str, layout: str, pool2: Pool) -> None:
    for message in pool2.run(refuse, train, way, layout, trainer=True):
        assert "model.embed_tokens.weight" in message
        assert "was written into behind a forward pass" in message


def read(ranks: int) -> None:
    """Reads the data of parameters behind a forward pass."""
    model = parallelize(tiny_llama(), build_mesh(resolve_sizes(ranks, dp_shard=ranks), "cpu"))
    ids = torch.zeros(1, 8, dtype=torch.long)
    for _ in range(3):
        loss = model(ids, labels=ids).loss
        assert all(bool(parameter.data.isfinite().all()) for parameter in model.parameters())
        loss.backward()


def test_what_is_read_is_no_error(pool2: Pool) -> None:
    pool2.run(read, 2)


def perturb(ranks: int) -> list[Tensor]:
    """Writes behind the backward pass, and takes it back, as SAM does, with a pass that is only read in between."""
    model: Any = tiny_llama()
    if ranks > 1:
        model = parallelize(model, build_mesh(resolve_sizes(ranks, dp_shard=ranks), "cpu"))
    ids = torch.randint(VOCABULARY, (STEPS, ROWS, 8), generator=torch.Generator().manual_seed(1))
    gradients = []
    for batch in ids:
        rows = batch.chunk(ranks)[dist.get_rank() if ranks > 1 else 0]
        model(rows, labels=rows).loss.backward()
        moves = [parameter.grad.clone() for parameter in model.parameters()]
        with torch.no_grad():
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.add_(move, alpha=0.1)
            model(rows)
        model.zero_grad()
        model(rows, labels=rows).loss.backward()
        with torch.no_grad():
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.sub_(move, alpha=0.1)
        gradients += [whole(parameter.grad) for parameter in model.parameters()]
        model.zero_grad()
    return gradients


def test_written_behind_backward_passes(nursery: Nursery, pool2: Pool) -> None:
    (expected,) = Pool(nursery, 1).run(perturb, 1)
    for found in pool2.run(perturb, 2):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
