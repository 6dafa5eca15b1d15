"""Under Megatron-FSDP, too, a backward pass through what a graph computed before a step is an error, and gradients from
before a pass are added.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor

from lightning_automodel.testing.pool import Pool
from tests.support.layouts import LAYOUTS
from tests.support.marks import with_long
from tests.support.subjects import gather_part
from tests.support.training import Descending, Recorder, SaveAfter, batches, make_trainer, tiny_llama

NAMES = [name for name in LAYOUTS if name.startswith("megatron") and LAYOUTS[name].ranks == 2]


class Stale(Recorder):
    """Steps by one loss before it goes back from another, perhaps with other passes between."""

    automatic_optimization = False

    def __init__(self, between: bool) -> None:
        super().__init__(tied=False)
        self.between = between

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        before = self.loss(batch)
        self.manual_backward(self.loss([batch[0].flip(0)]))
        optimizer.step()
        optimizer.zero_grad()
        if self.between:
            self.manual_backward(self.loss([batch[0].flip(1)]))
        self.manual_backward(before)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def stale(layout: str | None, between: bool) -> str:
    """Runs on each rank, or as one process: what the backward pass says."""
    strategy = LAYOUTS[layout].make() if layout else SingleDeviceStrategy(torch.device("cpu"))
    try:
        make_trainer(strategy, max_steps=2).fit(Stale(between), batches(LAYOUTS[layout].data_size if layout else 1))
    except RuntimeError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("layout", with_long(NAMES, "megatron0-dp2", "megatron2-dp2", "megatron3-tp2"))
def test_what_changed_cannot_be_used(layout: str, between: bool, pool2: Pool) -> None:
    changed = "modified by an inplace operation"
    assert changed in stale(None, between)
    for found in pool2.run(stale, layout, between, trainer=True):
        assert changed in found


class EmbeddingFirst(Recorder):
    """Steps an embedding between two backward passes through a graph that does not need its values."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__(tied=False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        output = self.model(input_ids=batch[0], labels=batch[0])
        for loss, optimizer in zip((output.loss, output.logits.square().mean()), optimizers, strict=True):
            self.manual_backward(loss, retain_graph=loss is output.loss)
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        parts = (self.model.model.embed_tokens, self.model.lm_head)
        return [torch.optim.SGD(part.parameters(), lr=0.5) for part in parts]


def stepped(layout: str | None) -> dict[str, Tensor | None]:
    """Runs on each rank, or as one process."""
    module = EmbeddingFirst()
    strategy = LAYOUTS[layout].make() if layout else SingleDeviceStrategy(torch.device("cpu"))
    make_trainer(strategy, max_epochs=1).fit(module, batches(LAYOUTS[layout].data_size if layout else 1))
    return {name: gather_part(parameter) for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("layout", with_long(NAMES, "megatron0-dp2", "megatron2-dp2"))
def test_what_no_backward_pass_needs_may_change(layout: str, pool2: Pool) -> None:
    expected = stepped(None)
    found = pool2.run(stepped, layout, trainer=True)[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


class Penalized(Recorder):
    """Goes back from a penalty on its weights before it goes back from its loss."""

    automatic_optimization = False

    def __init__(self, by_strategy: bool = False) -> None:
        super().__init__(tied=False)
        self.by_strategy = by_strategy

    def penalize(self) -> None:
        penalty = sum(parameter.norm() for parameter in self.model.model.layers.parameters())
        self.manual_backward(penalty) if self.by_strategy else penalty.backward()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.penalize()
        self.manual_backward(self.loss(batch))
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class GivesGradients(Penalized):
    """Lets gradients begin with a part of the weights, as decay by hand does."""

    def penalize(self) -> None:
        for parameter in self.parameters():
            parameter.grad = 0.3 * parameter.detach()


class AtStep(Penalized):
    """Adds the gradient of a penalty to those of a step."""

    def penalize(self) -> None:
        pass

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        super().penalize()


def penalized(layout: str | None, kind: type[Penalized]) -> dict[str, Tensor | None]:
    """Runs on each rank, or as one process."""
    module = kind()
    strategy = LAYOUTS[layout].make() if layout else SingleDeviceStrategy(torch.device("cpu"))
    make_trainer(strategy, max_epochs=1).fit(module, batches(LAYOUTS[layout].data_size if layout else 1))
    return {name: gather_part(parameter) for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("kind", [Penalized, GivesGradients])
@pytest.mark.parametrize("layout", with_long(NAMES[:4], "megatron1-dp2", "megatron3-dp2"))
def test_gradients_from_before_a_pass_are_added(layout: str, kind: type[Penalized], pool2: Pool) -> None:
    """They were lost from stage 2 on: weights were 5 times as far away as they are large."""
    found = pool2.run(penalized, layout, kind, trainer=True)[0]
    torch.testing.assert_close(found, penalized(None, kind), rtol=1e-4, atol=1e-6)


def refused(layout: str) -> str:
    """Runs on each rank."""
    with pytest.raises(ValueError, match="reads a parameter itself") as caught:
        make_trainer(LAYOUTS[layout].make(), max_epochs=1).fit(Penalized(by_strategy=True), batches(2))
    return str(caught.value)


@pytest.mark.parametrize("layout", ["megatron1-dp2", "megatron3-dp2"])
def test_a_gradient_that_a_pass_would_lose_is_an_error(layout: str, pool2: Pool) -> None:
    for message in pool2.run(refused, layout, trainer=True):
        assert "on_before_optimizer_step" in message


class Loads(Recorder):
    """Takes whole weights, when shards are there."""

    def on_train_start(self) -> None:
        self.model.load_state_dict({name: value * 0.5 for name, value in tiny_llama().state_dict().items()})


class Asks(Recorder):
    """Asks autograd for the gradient of a parameter."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        torch.autograd.grad(loss, self.model.lm_head.weight, retain_graph=True)
        return loss


class Decays(Recorder):
    """Adds a penalty to its loss."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        penalty = self.model.lm_head.weight.square().sum()
        return self.loss(batch) + 0.1 * penalty


def explained(kind: type[Recorder]) -> str:
    """Runs on each rank."""
    with pytest.raises(RuntimeError) as caught:
        make_trainer(LAYOUTS["megatron3-dp2"].make(), max_epochs=1).fit(kind(), batches(2))
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Loads, "load_state_dict was given whole"),
        (Decays, "use weight_decay"),
        (Asks, "parameter.grad behind self.manual_backward(loss)"),
    ],
)
def test_errors_of_torch_are_explained(kind: type[Recorder], said: str, pool2: Pool) -> None:
    for message in pool2.run(explained, kind, trainer=True):
        assert said in message.partition("torch says")[0]


@pytest.mark.parametrize("layout", ["megatron0-dp2", "megatron3-tp2"])
def test_norms_of_weights_have_their_gradients(layout: str, pool2: Pool) -> None:
    """They were halved where two ranks hold a weight."""
    found = pool2.run(penalized, layout, AtStep, trainer=True)[0]
    torch.testing.assert_close(found, penalized(None, AtStep), rtol=1e-4, atol=1e-6)


class EverySecond(Descending):
    """Takes a step of two batches by hand."""

    automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.loss(batch).backward()
        if batch_idx % 2:
            optimizer.step()
            optimizer.zero_grad()


class InTurns(Recorder):
    """Takes a step of each of two optimizers, behind a backward pass of its own."""

    automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        embedding = self.model.model.embed_tokens.weight
        others = [p for p in self.parameters() if p is not embedding]
        return torch.optim.SGD([embedding], lr=0.1), torch.optim.SGD(others, lr=0.1)


def save_by_hand(directory: Path) -> str:
    """Runs on each rank."""

    def fit(module: Recorder, behind: int) -> None:
        saver = SaveAfter(directory / f"{behind}.ckpt", behind)
        make_trainer(LAYOUTS["megatron2-dp2"].make(), max_epochs=1, callbacks=[saver]).fit(module, batches(2))

    fit(EverySecond(), 2)
    fit(InTurns(), 3)
    with pytest.raises(RuntimeError) as caught:
        fit(EverySecond(), 1)
    return str(caught.value)


@pytest.mark.slow
def test_gradients_that_wait_by_hand_are_not_left_out(pool2: Pool, tmp_path: Path) -> None:
    """Those of a plain ``loss.backward()`` were; and two optimizers that take turns could not be saved."""
    for message in pool2.run(save_by_hand, tmp_path, trainer=True):
        assert "between the micro-batches of an optimizer step" in message
