"""Optimizers that read the loss of a step: on data ranks with samples of their own, the steps of one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from lightning_automodel.strategies.steps.optimizers import reads_loss
from lightning_automodel.testing.pool import Nursery, Pool
from tests.support.layouts import LAYOUTS
from tests.support.training import Recorder, batches, make_trainer, whole_parameters


class Halving(Optimizer):
    """Halves its step until the loss has fallen."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 2.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        held = [p for group in self.param_groups for p in group["params"]]
        before = [(p.clone(), p.grad.clone()) for p in held]
        size = self.param_groups[0]["lr"]
        for _ in range(6):
            for p, (old, gradient) in zip(held, before, strict=True):
                p.copy_(old - size * gradient)
            with torch.enable_grad():
                if closure() < loss - 0.1 * size:
                    break
            size /= 2
        return loss


class Searching(Recorder):
    def configure_optimizers(self) -> Any:
        return Halving(self.parameters())


class ByHand(Searching):
    """Gives its optimizer numbers."""

    automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()

        def closure() -> float:
            optimizer.zero_grad()
            loss = super(ByHand, self).training_step(batch, batch_idx)
            self.manual_backward(loss)
            return float(loss)

        optimizer.step(closure)


class Wolfe(Recorder):
    def configure_optimizers(self) -> Any:
        return LBFGS(self.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")


def fitted(kind: type[Recorder], layout: str | None) -> tuple[list[float], dict[str, Tensor]]:
    """Runs on each rank."""
    chosen = LAYOUTS[layout] if layout else None
    strategy, size = (chosen.make(), chosen.data_size) if chosen else ("auto", 1)
    module = kind()
    make_trainer(strategy, max_epochs=1).fit(module, batches(size))
    return module.losses, whole_parameters(module)


@pytest.mark.parametrize(
    ("kind", "layout"), [(Searching, "fsdp2-dp2"), (Searching, "ddp-2"), (ByHand, "ddp-2"), (Wolfe, "ddp-2")]
)
def test_steps_are_those_of_one_process(kind: type[Recorder], layout: str, nursery: Nursery) -> None:
    losses, parameters = Pool(nursery, 1).run(fitted, kind, None, trainer=True)[0]
    assert len(losses) > 8
    for found, held in Pool(nursery, 2).run(fitted, kind, layout, trainer=True):
        assert found == pytest.approx(losses, rel=1e-4)
        torch.testing.assert_close(held, parameters, rtol=1e-3, atol=1e-4)


def test_who_reads_the_loss() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(4, 8))]
    assert reads_loss(LBFGS(parameters))
    assert reads_loss(Halving(parameters))
    assert not reads_loss(torch.optim.AdamW(parameters))
    assert not reads_loss(torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
