"""What optimizers train and the parallel module does not have: collected before it, made after it, or never told to it.

Each trained without a word, on each data rank with the gradients of its own samples (off by 1.0 in the first step), or,
collected before, not at all.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_automodel.testing.pool import Pool
from tests.support.layouts import LAYOUTS
from tests.support.training import HIDDEN, VOCABULARY, Descending, batches, make_trainer


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.up, self.down = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, 8), nn.Linear(8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.down(self.up(self.embedding(ids)).tanh())


class Trains(Descending):
    """A layer of one's own behind the model; where it comes from is the case."""

    late: Any

    def __init__(self) -> None:
        super().__init__()
        self.model, self.late = Net(), None

    def loss(self, batch: list[Tensor]) -> Tensor:
        hidden = self.model(batch[0])
        return (hidden if self.late is None else self.late(hidden)).square().mean()


class CollectedEarly(Trains):
    def __init__(self) -> None:
        super().__init__()
        self.groups = [{"params": list(self.model.parameters())}]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.groups, lr=0.1)


class InAList(Trains):
    def __init__(self) -> None:
        super().__init__()
        self.held = [nn.Linear(4, 4)]
        self.__dict__["late"] = self.held[0]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), *self.held[0].parameters()], lr=0.1)


class Buffered(Trains):
    def __init__(self) -> None:
        super().__init__()
        self.model.register_buffer("scale", torch.ones(4, requires_grad=True))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), self.model.scale], lr=0.1)


class WithTheOptimizer(Trains):
    def configure_optimizers(self) -> Any:
        self.late = nn.Linear(4, 4)
        return super().configure_optimizers()


class AtTheStart(Trains):
    def on_train_start(self) -> None:
        self.make()

    def make(self) -> None:
        self.late = nn.Linear(4, 4)
        self.optimizers().add_param_group({"params": self.late.parameters()})  # type: ignore[union-attr]


class InTheSecondEpoch(AtTheStart):
    def on_train_start(self) -> None:
        pass

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.make()


NEVER_TOLD = {InAList: "of shape [4, 4]", Buffered: "model.scale"}
MADE_LATER = dict.fromkeys((WithTheOptimizer, AtTheStart, InTheSecondEpoch), "late.weight")
REFUSED = {CollectedEarly: f"of shape [{VOCABULARY}, {HIDDEN}]", **NEVER_TOLD, **MADE_LATER}


def refuse(layout: str, kinds: list[type[Trains]], taken: list[type[Trains]]) -> list[str]:
    strategy = {"config": {"tp_plan": {"up": "colwise", "down": "rowwise"}}} if "tp2" in layout else {}
    found = []
    for kind in kinds:
        run = make_trainer(LAYOUTS[layout].make(**strategy), max_epochs=2)
        with pytest.raises(ValueError, match="not among the parameters of the parallel module") as caught:
            run.fit(kind(), batches(LAYOUTS[layout].data_size))
        found.append(str(caught.value))
    for kind in taken:
        make_trainer(LAYOUTS[layout].make(**strategy), max_epochs=2).fit(kind(), batches(LAYOUTS[layout].data_size))
    return found


@pytest.mark.parametrize("layout", ["fsdp2-dp2", "megatron3-dp2", "megatron3-tp2"])
def test_what_no_rank_would_reduce_is_named(layout: str, pool2: Pool) -> None:
    for found in pool2.run(refuse, layout, list(REFUSED), [], trainer=True):
        for message, name in zip(found, REFUSED.values(), strict=True):
            assert name in message


def test_replicas_take_what_comes_later(pool2: Pool) -> None:
    for found in pool2.run(refuse, "ddp-2", list(NEVER_TOLD), [CollectedEarly, *MADE_LATER], trainer=True):
        for message, name in zip(found, NEVER_TOLD.values(), strict=True):
            assert name in message
