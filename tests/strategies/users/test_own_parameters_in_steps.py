"""What steps do to parameters of a LightningModule's own, beside computing with them, against one process."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_automodel.testing.pool import Nursery, Pool
from tests.strategies.users.test_habits_of_steps import Steps, compare, fitted
from tests.support.marks import with_long
from tests.support.training import HIDDEN, Recorder

LAYOUT_NAMES = ("fsdp2-dp2", "fsdp2-tp2", "fsdp2-dp2-tp2")


class Scaled(Steps):
    """A temperature and prompts, which every loss reads."""

    def change(self) -> None:
        self.other = None
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.prompt = nn.Parameter(torch.full((4, HIDDEN), 0.1))

    def loss(self, batch: list[Tensor]) -> Tensor:
        rows = self.model.get_input_embeddings()(batch[0]) + self.prompt.mean(0)
        loss = self.model(inputs_embeds=rows, labels=batch[0]).loss / self.temperature
        return loss + 0.01 * loss.detach() * self.prompt.exp().mean()


class Stepping(Scaled):
    """Takes its steps itself."""

    automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach().clone())))
        self.pass_backward(loss)
        optimizer.step()
        self.temperature.data = torch.clamp(self.temperature.data, 0.66, 0.72)
        self.numbers.append(float(self.temperature))

    def pass_backward(self, loss: Tensor) -> None:
        loss.backward()


class ClipsItsOwn(Stepping):
    """Reads gradients within the step, clips some, and drops one."""

    def pass_backward(self, loss: Tensor) -> None:
        self.manual_backward(loss)
        gradients = [parameter.grad for parameter in (self.temperature, self.prompt)]
        self.numbers += [float(gradient.norm()) for gradient in gradients if gradient is not None]
        self.numbers.append(float(nn.utils.clip_grad_norm_([self.temperature, self.prompt], 0.01)))
        if len(self.losses) % 3 == 0:
            self.prompt.grad = None


class GivenData(Scaled):
    """Its step gives parameters other data, before it computes with them."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        self.prompt.data = 0.9 * self.prompt.data
        self.temperature.data = torch.clamp(self.temperature.data, max=0.68)
        return super().loss(batch)


class ChosenOnce(Scaled):
    """A step freezes one parameter and thaws another, for all steps to come."""

    def change(self) -> None:
        super().change()
        self.thawed = nn.Parameter(torch.ones(3), requires_grad=False)

    def loss(self, batch: list[Tensor]) -> Tensor:
        if len(self.losses) == 2:
            self.prompt.requires_grad_(False)
            self.thawed.requires_grad = True
        self.numbers.append(float(self.prompt.requires_grad) + 2 * float(self.thawed.requires_grad))
        return super().loss(batch) * self.thawed.mean()


class ChosenByName(Scaled):
    """Its step lets parameters train by turns, which it finds by name."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        for name, parameter in self.named_parameters():
            if name in ("temperature", "prompt"):
                parameter.requires_grad_((len(self.losses) // 2 + len(name)) % 2 == 0)
        return super().loss(batch)


class Counting(Stepping):
    """Counts in a frozen parameter, which its step writes to."""

    def change(self) -> None:
        super().change()
        self.count = nn.Parameter(torch.zeros(2), requires_grad=False)

    def loss(self, batch: list[Tensor]) -> Tensor:
        self.count.add_(1)
        return super().loss(batch) * self.count.mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(
            [p for p in self.parameters() if p.requires_grad], lr=0.1
        )  # of a loss that is multiplied by up to the number of steps


class FailsOnce(Stepping):
    """One backward pass ends in an exception that the step catches."""

    def failing_loss(self) -> Tensor:
        embedded = self.model.get_input_embeddings()(torch.zeros(1, 6, dtype=torch.long))
        embedded.register_hook(lambda gradient: 1 / 0)
        output = self.model(inputs_embeds=embedded + self.prompt.mean(0), labels=torch.zeros(1, 6, dtype=torch.long))
        return output.loss * self.temperature

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        if len(self.losses) == 2:
            with pytest.raises(ZeroDivisionError):
                self.run_backward(self.failing_loss())
            optimizer.zero_grad()
        loss = self.loss(batch)
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach().clone())))
        self.run_backward(loss)
        optimizer.step()

    def run_backward(self, loss: Tensor) -> None:
        loss.backward()


class FailsOnceByStrategy(FailsOnce):
    def run_backward(self, loss: Tensor) -> None:
        self.manual_backward(loss)


class BySamplesByHand(Stepping):
    """``loss.backward()`` on ranks of which some read a parameter and others do not."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        loss = Recorder.loss(self, batch)
        if share := (batch[0].sum(1) % 2).float().mean():  # of a rank with one row all or nothing
            loss = loss + 3 * share * (self.prompt.exp().mean() + self.temperature)
        return loss


class ReadAsWhole(Scaled):
    """Takes a parameter from a dict of all of them, and the whole tensor of it."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        found = dict(self.named_parameters())["temperature"]
        return super().loss(batch) * (found.full_tensor() if isinstance(found, DTensor) else found)


KINDS = (
    ClipsItsOwn,
    GivenData,
    ChosenOnce,
    ChosenByName,
    Counting,
    FailsOnce,
    FailsOnceByStrategy,
    BySamplesByHand,
    ReadAsWhole,
)
CASES = [(kind, layout) for kind in KINDS for layout in LAYOUT_NAMES]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layout"), with_long(CASES, *(case for case in CASES if case[1] != "fsdp2-dp2" or case[0] is FailsOnce))
)
def test_steps_are_those_of_one_process(kind: type[Steps], layout: str, nursery: Nursery) -> None:
    compare(nursery, kind, layout)


class Replaced(Scaled):
    """Another tensor comes in the place of a parameter, also for the optimizer."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch:
            self.prompt = nn.Parameter(torch.zeros(4, HIDDEN))
            self.trainer.optimizers[0].param_groups[0]["params"] = list(self.parameters())


def refuse_replaced() -> None:
    with pytest.raises(ValueError, match="SGD trains prompt, a tensor that is not among the parameters"):
        fitted(Replaced, "fsdp2-dp2")


def test_another_tensor_is_refused(pool2: Pool) -> None:
    pool2.run(refuse_replaced, trainer=True)


class KeepsGraph(Stepping):
    """Goes a second time through what it computed before a step."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        own = 1e-3 * self.temperature.square() * self.temperature
        self.manual_backward(own + self.loss(batch), retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            self.manual_backward(own)
        self.temperature.data.clamp_(0.66, 0.72)
        self.numbers.append(float(own))


@pytest.mark.parametrize("layout", with_long(["fsdp2-dp2", "fsdp2-tp2"], "fsdp2-tp2"))
def test_a_graph_from_before_a_step_is_an_error(layout: str, pool2: Pool) -> None:
    assert all(found["numbers"] for found in pool2.run(fitted, KeepsGraph, layout, trainer=True))


class ReadByName(Scaled):
    """Takes a parameter from a dict of all of them, in the place of the attribute."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        return super().loss(batch) * dict(self.named_parameters())["temperature"]


class ReadFromList(Steps):
    """Holds parameters in a list only."""

    def change(self) -> None:
        self.other = None
        self.weights = nn.ParameterList([torch.ones(()), torch.ones(2)])

    def loss(self, batch: list[Tensor]) -> Tensor:
        return super().loss(batch) * next(self.weights.parameters())


def said_of(kind: type[Steps]) -> str:
    """Runs on each rank."""
    with pytest.raises(RuntimeError, match="mixed torch") as caught:
        fitted(kind, "fsdp2-dp2")
    return str(caught.value)


@pytest.mark.parametrize(("kind", "way"), [(ReadByName, "self.temperature"), (ReadFromList, "self.weights[0]")])
def test_what_is_read_by_name_is_told_its_attribute(kind: type[Steps], way: str, pool2: Pool) -> None:
    assert all(f"if it is read as {way}" in text for text in pool2.run(said_of, kind, trainer=True))
