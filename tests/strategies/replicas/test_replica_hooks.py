"""Hooks on parameters, and backward passes beside that of the loss, on replicas: the numbers of one process."""

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from lightning_automodel import DDPConfig, DDPStrategy
from lightning_automodel._compat.torch.modules import gradient_hooks_of
from lightning_automodel.testing.pool import Nursery, Pool
from tests.strategies.replicas.test_ddp import worst
from tests.support.training import Recorder, make_trainer, whole, whole_parameters, world_size

BOUND, ROWS, GLOBAL_BATCH = 0.01, 24, 4


class Small(Recorder):
    """Its gradients are bounded where a mean of bounded ones is another one."""

    options: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
        self.gradients: list[dict[str, Tensor]] = []
        self.build()

    def build(self) -> None:
        """Put hooks on parameters."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        self.batch = batch
        return mse_loss(self.model(batch[0]), batch[1])

    def other_loss(self) -> Tensor:
        return 0.5 * self.model[0](self.batch[0]).square().mean()

    def bound(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-BOUND, BOUND)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append({name: whole(p.grad) for name, p in self.named_parameters() if p.grad is not None})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class BoundsInBackward(Small):
    def backward(self, loss: Tensor) -> None:  # type: ignore[override]
        loss.backward()
        self.bound()


class BackTwice(Small):
    def backward(self, loss: Tensor) -> None:  # type: ignore[override]
        loss.backward(retain_graph=True)
        (0.3 * loss).backward()


class BackTwiceInView(BackTwice):
    options: ClassVar = {"gradient_as_bucket_view": True}


class BackInHook(Small):
    def on_after_backward(self) -> None:
        self.other_loss().backward()


class BackBeforeStep(Small):
    options: ClassVar = {"static_graph": True}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.other_loss().backward()
        super().on_before_optimizer_step(optimizer)


class FreezesAndBounds(Small):
    """Another layer trains in each step, which the step itself chooses."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        number: int = self.trainer.fit_loop.epoch_loop.batch_idx
        self.model[2].requires_grad_(number % 2 == 0)
        return super().loss(batch)

    def on_after_backward(self) -> None:
        self.bound()


class HookedGradients(Small):
    """Hooks that follow each other, and a gradient of its own, for which they run, too."""

    options: ClassVar = {"gradient_as_bucket_view": True}

    def build(self) -> None:
        for parameter in self.model.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-BOUND, BOUND))
            parameter.register_hook(lambda gradient: gradient.sign() * gradient.abs().sqrt())
            parameter.register_hook(lambda gradient: None)

    def loss(self, batch: list[Tensor]) -> Tensor:
        loss = super().loss(batch)
        torch.autograd.grad(loss, self.model[0].weight, retain_graph=True)
        return loss


class HookedForAnEpoch(Small):
    def on_train_start(self) -> None:
        self.handles = [p.register_hook(lambda g: g.clamp(-BOUND, BOUND)) for p in self.parameters()]

    def on_train_epoch_end(self) -> None:
        for handle in self.handles:
            handle.remove()


class HookedSums(Small):
    def build(self) -> None:
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(self.bound_one)

    def bound_one(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.clamp_(-BOUND, BOUND)


class StepsInBackward(Small):
    """Has an optimizer for each parameter, which steps when the gradient is there."""

    automatic_optimization = False

    def build(self) -> None:
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(self.step)

    def step(self, parameter: Tensor) -> None:
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        optimizer.step()
        optimizer.zero_grad()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        if batch_idx % 2:
            loss.backward()
        else:
            self.manual_backward(loss)

    def configure_optimizers(self) -> None:
        return None


class GoesOn(Small):
    """Goes on behind an exception of a backward pass."""

    automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1:
            hidden = self.model[0](batch[0])
            hidden.register_hook(self.fail)
            loss = self.model[1:](hidden).sum()
        optimizer.zero_grad()
        try:
            loss.backward()
        except ValueError:
            return
        optimizer.step()

    def fail(self, gradient: Tensor) -> None:
        raise ValueError


KINDS = (
    *(BoundsInBackward, BackTwice, BackTwiceInView, BackInHook, BackBeforeStep, FreezesAndBounds),
    *(HookedGradients, HookedForAnEpoch, HookedSums, StepsInBackward, GoesOn),
)


def fitted(kind: type[Small]) -> dict[str, Any]:
    module = kind()
    count = {"accumulate_grad_batches": 2} if kind.automatic_optimization else {}
    numbers = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(*(torch.randn(ROWS, width, generator=numbers) for width in (6, 2)))
    loader = torch.utils.data.DataLoader(data, batch_size=GLOBAL_BATCH // world_size())
    strategy: Any = DDPStrategy(DDPConfig(**kind.options)) if world_size() > 1 else "auto"
    before = [gradient_hooks_of(parameter) for parameter in module.parameters()]
    make_trainer(strategy, max_epochs=2, **count).fit(module, loader)
    if kind is HookedGradients:
        assert [gradient_hooks_of(parameter) for parameter in module.parameters()] == before
    return {"gradients": module.gradients, "parameters": whole_parameters(module)}


def fit_all() -> dict[str, dict[str, Any]]:
    """Runs on each rank."""
    return {kind.__name__: fitted(kind) for kind in KINDS}


@pytest.mark.slow
def test_hooks_and_other_backward_passes_are_those_of_one_process(nursery: Nursery, pool2: Pool) -> None:
    (expected,) = Pool(nursery, 1).run(fit_all, trainer=True)
    for ranks in pool2.run(fit_all, trainer=True):
        differences = {name: worst(ranks[name], one) for name, one in expected.items()}
        assert differences == pytest.approx(dict.fromkeys(expected, 0.0), abs=1e-5)
