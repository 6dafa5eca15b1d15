"""Lists, dicts, dataclasses and objects that blocks are called with, and write into: losses of layers, keys of segments
before, memory. Wrappers give each block a copy of those that hold tensors with a gradient, but for objects.
"""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from lightning_automodel import FSDP2Config, parallelize
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.testing.pool import Nursery, Pool
from tests.support.changes import changed
from tests.support.layouts import LAYOUTS
from tests.support.training import HIDDEN, VOCABULARY, Descending, tiny_llama

BLOCKS = 3


@dataclass
class Memory:
    """What a block leaves to the next one, and to the next segment."""

    keys: Tensor | None = None
    reads: int = 0


class Notes:
    """The same, and no container that anybody knows."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.reads = 0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.keys, self.out = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor, index: int, given: Any) -> Tensor:
        keys = self.keys(hidden)  # [batch, seq, hidden]
        if isinstance(given, Memory | Notes):
            past, given.keys, given.reads = given.keys, keys, given.reads + 1
        elif isinstance(given, list):
            past = None
            given.append(keys.square().mean())
        else:
            given["reads"] = given.get("reads", 0) + 1
            pair = given["layers"][index].get("pair")
            past = None if pair is None else pair[0]
            given["layers"][index]["pair"] = (keys, hidden)
        context = keys if past is None else torch.cat([past, keys], 1)
        return hidden + torch.tanh(self.out(hidden)) * context.mean(1, keepdim=True)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, ids: Tensor, given: Any) -> Tensor:
        hidden = self.embed(ids)
        for index, block in enumerate(self.layers):
            hidden = block(hidden, index=index, given=given)
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), ids.flatten())


def seeded() -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net()


class LossesInList(Descending):
    """Each block appends a loss."""

    def configure_model(self) -> None:
        if self.model is None:
            self.model = seeded()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        losses: list[Tensor] = []
        loss = self.model(batch[0], losses)
        assert len(losses) == BLOCKS
        return loss + sum(losses)


class SegmentsInDicts(LossesInList):
    """Blocks keep keys for the next segment, and the loss is of the last one."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        store: dict[str, Any] = {"layers": [{} for _ in range(BLOCKS)]}
        first, second = batch[0].chunk(2, dim=1)
        self.model(first, store)
        loss = self.model(second, store)
        assert store["reads"] == 2 * BLOCKS
        return loss


class MemoryInDataclass(LossesInList):
    """Blocks hand memory on to each other, and to the next segment."""

    kind: type = Memory

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        memory = self.kind()
        first, second = batch[0].chunk(2, dim=1)
        self.model(first, memory)
        loss = self.model(second, memory)
        assert memory.reads == 2 * BLOCKS
        return loss


class MemoryInObject(MemoryInDataclass):
    """The same in an object."""

    kind = Notes


def fitted(kind: type[Descending], layout: str, levers: dict[str, Any]) -> dict[str, Tensor]:
    """Runs on each rank."""
    return changed(kind(), seeded(), layout, levers)


KINDS: list[type[Descending]] = [LossesInList, SegmentsInDicts, MemoryInDataclass, MemoryInObject]
CASES: list[tuple[type[Descending], str, dict[str, Any]]] = [
    *((kind, layout, {}) for kind in KINDS for layout in ("fsdp2-dp2", "megatron3-dp2")),
    *((kind, "fsdp2-dp2", {"activation_checkpointing": True}) for kind in KINDS),
    (SegmentsInDicts, "fsdp2-dp2", {"enable_compile": True, "compile_backend": "aot_eager"}),
]


@pytest.mark.parametrize(("kind", "layout", "levers"), CASES, ids=lambda value: getattr(value, "__name__", None))
def test_steps_are_those_of_one_process(
    kind: type[Descending], layout: str, levers: dict[str, Any], nursery: Nursery
) -> None:
    (one,) = Pool(nursery, 1).run(fitted, kind, "ddp-1", {}, trainer=True)
    many = Pool(nursery, LAYOUTS[layout].ranks).run(fitted, kind, layout, levers, trainer=True, timeout=100)[0]
    assert one.keys() == many.keys()
    for name, change in one.items():
        assert (many[name] - change).norm() <= 1e-4 * change.norm(), name


def evaluated() -> tuple[int, bool]:
    """Runs on each rank: how much blocks append in a pass without gradients, and whether what was there is left."""
    model = seeded()
    parallelize(model, build_mesh(resolve_sizes(2), "cpu"), FSDP2Config(mp_policy={"param_dtype": torch.bfloat16}))
    there = torch.zeros(())
    losses = [there]
    with torch.no_grad():
        model(torch.arange(4)[None], losses)
    return len(losses), losses[0] is there


def test_blocks_write_where_arguments_are_cast(pool2: Pool) -> None:
    assert pool2.run(evaluated) == [(1 + BLOCKS, True)] * 2


class Remembering(LlamaDecoderLayer):
    """Adds what the layer before has left. Tensor parallelism tries it, and looks for what it draws."""

    def forward(self, hidden_states: Tensor, *args: Any, memory: Any = None, **kwargs: Any) -> Tensor:
        output = super().forward(hidden_states, *args, **kwargs)
        held = memory if isinstance(memory, dict) else vars(memory)
        past, held["keys"], held["reads"] = held.get("keys"), output.mean(-1), held.get("reads", 0) + 1
        return output if past is None else output + past.unsqueeze(-1)


def remembering() -> LlamaForCausalLM:
    model = tiny_llama(tied=False)
    for layer in model.model.layers:
        layer.__class__ = Remembering
    return model


class Remembers(Descending):
    """A loss of what layers are called with to write into."""

    kind: type = dict

    def configure_model(self) -> None:
        if self.model is None:
            self.model = remembering()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        memory = self.kind()
        loss = self.model(input_ids=batch[0], labels=batch[0], memory=memory).loss
        held = memory if isinstance(memory, dict) else vars(memory)
        assert held["reads"] == len(self.model.model.layers)
        return loss + 10 * held["keys"].square().mean()


class RemembersInDataclass(Remembers):
    kind = Memory


class RemembersInObject(Remembers):
    kind = Notes


def remembered(kind: type[Descending], layout: str) -> dict[str, Tensor]:
    """Runs on each rank."""
    return changed(kind(), remembering(), layout, {})


@pytest.mark.parametrize("kind", [Remembers, RemembersInDataclass, RemembersInObject])
def test_trials_write_into_copies(kind: type[Descending], nursery: Nursery) -> None:
    (one,) = Pool(nursery, 1).run(remembered, kind, "ddp-1", trainer=True)
    many = Pool(nursery, 2).run(remembered, kind, "fsdp2-tp2", trainer=True)[0]
    for name, change in one.items():
        assert (many[name] - change).norm() <= 1e-4 * change.norm(), name
