"""Gradients of a step are gone in the next one's forward pass, except where the user's code might see that."""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any
from unittest.mock import MagicMock

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.data import DataLoader

from lightning_automodel import FSDP2Config, FSDP2TPStrategy
from lightning_automodel.gradients import to_local_if_dtensor
from lightning_automodel.testing.pool import Pool
from tests.support.training import make_trainer

STEPS, ACCUMULATED = 3, 2
STRATEGIES: dict[str, Callable[[], Any]] = {
    "shards": FSDP2TPStrategy,
    "tp": lambda: FSDP2TPStrategy(tp=2, config=FSDP2Config(tp_plan={"first": "colwise", "second": "rowwise"})),
    "reduced at once": lambda: FSDP2TPStrategy(config=FSDP2Config(defer_fsdp_grad_sync=False)),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


class Noting(L.LightningModule):
    """Notes in each training step how many of the tensors that held gradients behind the last one are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.refs: list[StorageWeakRef] = []
        self.held: list[bool] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.held.append(any(not ref.expired() for ref in self.refs))
        return self.net(batch).square().mean()

    def on_train_batch_end(self, *args: Any) -> None:
        found = [to_local_if_dtensor(p.grad) for p in self.parameters() if p.grad is not None]
        self.refs = [StorageWeakRef(tensor.untyped_storage()) for tensor in found]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class LogsNorms(Noting):
    """In hooks that run where gradients are."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_norms()

    def log_norms(self) -> None:
        self.log("norm", sum(p.grad.norm() for p in self.parameters()))


class InStep(Noting):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if batch_idx > 100 and self.net.first.weight.grad is not None:
            return None
        return super().training_step(batch, batch_idx)


class InMethod(Noting):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if batch_idx > 100:
            self.tell()
        return super().training_step(batch, batch_idx)

    def tell(self) -> None:
        print([getattr(p, "grad", None) for p in self.parameters()])


class Scale:
    """No module."""

    @property
    def value(self) -> float:
        return float(self.weight.grad is not None)

    weight: Any = nn.Parameter(torch.ones(1))


class InProperty(Noting):
    def __init__(self) -> None:
        super().__init__()
        self.scale = Scale()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return super().training_step(batch + self.scale.value, batch_idx)


@cache
def helper() -> Scale:
    return Scale()


class InCached(Noting):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return super().training_step(batch + helper().value, batch_idx)


ANYTHING = MagicMock()


class Mocking(Noting):
    """Names what has any attribute."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        ANYTHING.note(batch)
        return super().training_step(batch, batch_idx)


def norms(module: nn.Module) -> list[Tensor]:
    return [p.grad.norm() for p in module.parameters() if p.grad is not None]


class InFunction(Noting):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return super().training_step(batch + len(norms(self)) * 0, batch_idx)


class Reading(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if self.first.weight.grad is None else x.clone())


class InForward(Noting):
    def __init__(self) -> None:
        super().__init__()
        self.net = Reading()


class InHook(Noting):
    def __init__(self) -> None:
        super().__init__()
        self.net.first.register_forward_pre_hook(lambda module, args: (args[0] + 0 * len(norms(module)),))


def with_norms(step: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(step)
    def run(self: Any, batch: Tensor, batch_idx: int) -> Any:
        return step(self, batch + 0 * len(norms(self)), batch_idx)

    return run


class InDecorator(Noting):
    @with_norms
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)


class InTable(Noting):
    def __init__(self) -> None:
        super().__init__()
        self.extras = {"count": [lambda: len(norms(self))]}

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return super().training_step(batch + 0 * self.extras["count"][0](), batch_idx)


class InDefault(Noting):
    def training_step(self, batch: Tensor, batch_idx: int, /, counted: Any = (norms,)) -> Any:
        return super().training_step(batch + 0 * len(counted[0](self)), batch_idx)


class Counting(L.Callback):
    def counted(self, module: L.LightningModule) -> int:
        return len(norms(module))


class InCallback(Noting):
    def configure_callbacks(self) -> Any:
        return Counting()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        counts = [callback.counted(self) for callback in self.trainer.callbacks if isinstance(callback, Counting)]  # type: ignore[attr-defined]
        return super().training_step(batch + 0 * sum(counts), batch_idx)


class ClipsThere(Noting):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        if batch_idx > 100:
            torch.nn.utils.clip_grad_value_(self.parameters(), 1e9)
        return super().training_step(batch, batch_idx)


class OwnClearing(Noting):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad()


class OwnOptimizer(Noting):
    def configure_optimizers(self) -> Any:
        class Keeping(torch.optim.SGD):
            def zero_grad(self, set_to_none: bool = True) -> None:
                super().zero_grad(set_to_none)

        return Keeping(self.parameters(), lr=0.1)


class Watching(L.Callback):
    def on_before_zero_grad(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Any) -> None:
        pass


class Watched(Noting):
    def configure_callbacks(self) -> Any:
        return Watching()


class Manual(Noting):
    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


KEEPING = [
    *(InStep, InMethod, InProperty, InCached, InFunction, InForward, InHook, ClipsThere),
    *(InDecorator, InTable, InDefault, InCallback),
    *(OwnClearing, OwnOptimizer, Watched, Manual),
]


def held(strategy: str, kinds: list[type[Noting]], **arguments: Any) -> dict[str, list[bool]]:
    """Runs on each rank: for each micro-batch, whether gradients were there when its training step began."""
    found = {}
    for kind in kinds:
        torch.manual_seed(0)
        module = kind()
        trainer = make_trainer(STRATEGIES[strategy](), max_steps=STEPS, **arguments)
        trainer.fit(module, DataLoader(torch.ones(64, 4), batch_size=2))
        found[kind.__name__] = module.held
    return found


@pytest.mark.parametrize("strategy", ["shards", "tp"])
def test_they_are_gone_before_the_forward_pass(pool2: Pool, strategy: str) -> None:
    for found in pool2.run(held, strategy, [Noting, LogsNorms, Mocking], trainer=True):
        assert found == dict.fromkeys(("Noting", "LogsNorms", "Mocking"), [False] * STEPS)


def test_those_of_a_step_that_is_not_complete_stay(pool2: Pool) -> None:
    for found in pool2.run(held, "reduced at once", [Noting], accumulate_grad_batches=ACCUMULATED, trainer=True):
        assert found == {"Noting": [False, True] * STEPS}  # by micro-batches


@pytest.mark.slow
def test_they_stay_where_code_of_the_users_might_see_them(pool2: Pool) -> None:
    for found in pool2.run(held, "shards", KEEPING, trainer=True):
        assert found == {kind.__name__: [False] + [True] * (STEPS - 1) for kind in KEEPING}
