"""Parts of a model that some samples do not use (heads of tasks, experts, a backbone that is only read), on ranks with
other samples: every gradient, also none, is that of one process.
"""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import AutoModel

from lightning_automodel import FSDP2Config, FSDP2TPStrategy
from lightning_automodel.testing.pool import Nursery, Pool
from tests.strategies.users.test_own_code import Noted, check_gradients
from tests.support.marks import with_long
from tests.support.training import HIDDEN, LENGTH, VOCABULARY, make_trainer, tiny_llama, whole_parameters, world_size

WINDOW, STEPS, KINDS = 4, 3, 3
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {},
    "replicas": {"dp_replicate": 2},
    "cp": {"cp": 2},
    "dp-tp": {"dp_shard": 2, "tp": 2},
    "hybrid": {"dp_replicate": 2, "dp_shard": 2},
    "reduced each time": {"config": FSDP2Config(defer_fsdp_grad_sync=False)},
}
TASKS = (0, 1, 0, 0, 1, 1, 0, 1, 0, 0, 0, 0)  # of the micro-batches: those of a step, and of its ranks, differ


class Heads(nn.Module):
    """Of several shapes; nothing chooses the last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(HIDDEN, KINDS), make_head(), nn.Linear(HIDDEN, KINDS)

    def forward(self, x: Tensor, task: int) -> Tensor:
        return (self.first, self.second)[task](x)


def make_head() -> nn.Sequential:
    return nn.Sequential(nn.Linear(HIDDEN, 5), nn.Tanh(), nn.Linear(5, KINDS))


class Tasks(Noted):
    """Each micro-batch has its task; decay and moments would change a head with a gradient of zeros."""

    heads: Any

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(0)
            self.model = AutoModel.from_config(tiny_llama().config)
            self.build()

    def build(self) -> None:
        self.heads = Heads()

    def features(self, batch: dict[str, Any]) -> Tensor:
        return self.model(input_ids=batch["ids"]).last_hidden_state.mean(1)

    def loss(self, batch: dict[str, Any]) -> Tensor:  # type: ignore[override]
        return cross_entropy(self.heads(self.features(batch), TASKS[batch["number"]]), batch["kinds"])

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:  # type: ignore[override]
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.3)


class HeadsInList(Heads):
    """A list of one kind of layers is no list of blocks where one is chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(make_head() for _ in range(3))

    def forward(self, x: Tensor, task: int) -> Tensor:
        return self.heads[task](x)


class TasksOfList(Tasks):
    """The same, with heads in a list."""

    def build(self) -> None:
        self.heads = HeadsInList()


class TasksInTurn(Tasks):
    """Heads that are sharded each for itself; in a micro-batch all ranks use the same, and in the last one another."""

    def build(self) -> None:
        self.heads = nn.ModuleList([nn.Linear(HIDDEN, KINDS), make_head()])

    def loss(self, batch: dict[str, Any]) -> Tensor:  # type: ignore[override]
        head = self.heads[batch["number"] % WINDOW // 2]
        return cross_entropy(head(self.features(batch)), batch["kinds"])


class ByHand(TasksInTurn):
    """The same, with steps by hand."""

    automatic_optimization = False

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> None:  # type: ignore[override]
        micro_batches = WINDOW // data_size(self.trainer)
        is_last, alone = (batch_idx + 1) % micro_batches == 0, world_size() == 1
        with nullcontext() if is_last or alone else self.trainer.strategy.block_backward_sync():  # type: ignore[attr-defined]
            self.manual_backward(self.loss(batch) / micro_batches)
        if is_last:
            optimizer: Any = self.optimizers()
            self.clip_gradients(optimizer, 0.5)
            optimizer.step()
            optimizer.zero_grad()


class ReadBackbone(Tasks):
    """In the last micro-batches of a step the backbone is read, and the head trains."""

    def features(self, batch: dict[str, Any]) -> Tensor:
        with torch.set_grad_enabled(batch["number"] % WINDOW < 2):
            return super().features(batch)


class Experts(nn.Module):
    """Calls each expert with its tokens, and the others not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        nn.init.normal_(self.gate.weight, std=3.0)

    def forward(self, x: Tensor) -> Tensor:
        tokens, output = x.flatten(0, 1), torch.zeros_like(x.flatten(0, 1))
        weights, chosen = self.gate(tokens).softmax(-1).max(-1)
        for number in chosen.unique().tolist():
            places = (chosen == number).nonzero().flatten()
            output = output.index_add(0, places, weights[places, None] * self.experts[number](tokens[places]))
        return output.view_as(x)


class ListsOfExperts(Tasks):
    """Blocks with experts in a list, as code from the hub has them."""

    def build(self) -> None:
        super().build()
        for layer in self.model.layers:
            layer.mlp = Experts()


def data_size(trainer: Any) -> int:
    return trainer.distributed_sampler_kwargs["num_replicas"] if world_size() > 1 else 1


def micro_batches() -> DataLoader:
    """Of one process, of which each data rank gets its share."""
    numbers = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCABULARY, (STEPS * WINDOW, 2, LENGTH), generator=numbers)
    kinds = torch.randint(KINDS, (STEPS * WINDOW, 2), generator=numbers)
    items = [{"number": i, "ids": ids[i], "kinds": kinds[i]} for i in range(len(ids))]
    return DataLoader(items, batch_size=None)  # type: ignore[arg-type]


def fitted(kind: type[Tasks], layout: str | None) -> dict[str, Any]:
    """Runs on each rank."""
    module, automatic = kind(), kind.automatic_optimization
    sizes = LAYOUTS[layout] if layout else {}
    ranks = world_size() // (sizes.get("tp", 1) * sizes.get("cp", 1))
    arguments = {"accumulate_grad_batches": WINDOW // ranks, "gradient_clip_val": 0.5} if automatic else {}
    strategy: Any = FSDP2TPStrategy(**sizes) if layout else "auto"
    make_trainer(strategy, max_epochs=1, **arguments).fit(module, micro_batches())
    return {"gradients": module.gradients, "parameters": whole_parameters(module)}


SUBJECTS = (Tasks, TasksOfList, TasksInTurn, ByHand, ReadBackbone, ListsOfExperts)
ALL = [(kind, layout) for kind in SUBJECTS for layout in LAYOUTS]
# Four data ranks have one micro-batch of a step each, in which they do not use the same layers.
CASES = [(kind, layout) for kind, layout in ALL if kind in (Tasks, TasksOfList, ListsOfExperts) or layout != "hybrid"]
FAST = [*((kind, "dp") for kind in SUBJECTS), (Tasks, "replicas")]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout"), with_long(CASES, *(case for case in CASES if case not in FAST)))
def test_steps_are_those_of_one_process(kind: type[Tasks], layout: str, nursery: Nursery) -> None:
    (one,) = Pool(nursery, 1).run(fitted, kind, None, trainer=True)
    ranks = 4 if layout in ("dp-tp", "hybrid") else 2
    for many in Pool(nursery, ranks).run(fitted, kind, layout, trainer=True):
        assert len(one["gradients"]) == len(many["gradients"]) == STEPS
        for expected, found in zip(one["gradients"], many["gradients"], strict=True):
            assert expected.keys() == found.keys()
            check_gradients(expected, found)
        for name, value in one["parameters"].items():
            torch.testing.assert_close(many["parameters"][name], value, rtol=1e-4, atol=1e-4)
