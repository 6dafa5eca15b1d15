"""What users do between the micro-batches of an optimizer step, with the steps of one process."""

import warnings
from contextlib import nullcontext
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_automodel import FSDP2TPStrategy
from lightning_automodel.testing.pool import Nursery, Pool, RankFailed
from tests.strategies.users.test_own_code import check_gradients
from tests.support.layouts import LAYOUTS
from tests.support.marks import with_long
from tests.support.subjects import gather_part
from tests.support.training import Descending, batches, make_trainer

WINDOW, ROWS = 4, 64  # 16 batches


class Weights(L.Callback):
    """Keeps the weights behind each micro-batch."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        self.found.append({name: gather_part(p) for name, p in module.named_parameters()})


class DropsByOptimizer(Descending):
    """Throws away the first two micro-batches of the second step."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == WINDOW + 1:
            self.optimizers().zero_grad()  # type: ignore[union-attr]


class DropsByModule(Descending):
    """The same, of the module."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == WINDOW + 1:
            self.zero_grad()


class Changes(Descending):
    """Makes steps shorter, and longer, within one."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        sizes = {1: 2, 4: 4, 9: 5}
        self.trainer.accumulate_grad_batches = sizes.get(batch_idx, self.trainer.accumulate_grad_batches)


class Stops(Descending):
    """Ends the first run within a step; the second begins anew."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.max_epochs == 1 and batch_idx == WINDOW + 1:
            self.trainer.should_stop = True


class Raises(Descending):
    """Fails within a step, behind its backward pass; the second run begins anew."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.max_epochs == 1 and batch_idx == WINDOW + 1:
            raise RuntimeError("meant")


class DropsByHand(Descending):
    """Throws away a micro-batch whose loss it does not like, with steps by hand."""

    automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        self.accumulate(batch, batch_idx)
        if batch_idx == WINDOW + 1:
            optimizer.zero_grad()
        if batch_idx % WINDOW == WINDOW - 1:
            optimizer.step()
            optimizer.zero_grad()

    def accumulate(self, batch: list[Tensor], batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        is_last, alone = batch_idx % WINDOW == WINDOW - 1, not hasattr(strategy, "block_backward_sync")
        with nullcontext() if is_last or alone else strategy.block_backward_sync():
            self.manual_backward(self.loss(batch) / WINDOW)


class DropsOfOne(DropsByHand):
    """Throws away what one of two optimizers would step with, as zeros."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizers: Any = self.optimizers()
        self.accumulate(batch, batch_idx)
        if batch_idx == WINDOW + 1:
            optimizers[0].zero_grad(set_to_none=False)
        if batch_idx % WINDOW == WINDOW - 1:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        return torch.optim.SGD(parameters[::2], lr=0.1), torch.optim.SGD(parameters[1::2], lr=0.1)


CASES: list[type[Descending]] = [DropsByOptimizer, DropsByModule, Changes, Stops, Raises, DropsByHand, DropsOfOne]


def run(layout: str | None, kind: type[Descending]) -> list[dict[str, Any]]:
    """Runs on each rank: Lightning's own strategy for one device, or ours."""
    module, weights = kind(), Weights()
    for epochs in (1, 2) if kind in (Stops, Raises) else (1,):
        strategy: Any = LAYOUTS[layout].make() if layout else "auto"
        size = {"accumulate_grad_batches": WINDOW} if module.automatic_optimization else {}
        trainer = make_trainer(strategy, max_epochs=epochs, callbacks=[weights], **size)
        with pytest.raises(RuntimeError, match="meant") if (kind, epochs) == (Raises, 1) else nullcontext():
            trainer.fit(module, batches(LAYOUTS[layout].data_size if layout else 1, ROWS))
    return weights.found


NAMES = ("fsdp2-dp2", "fsdp2-tp2", "ddp-2", "megatron1-dp2", "megatron3-dp2", "megatron0-dp2", "megatron2-dp2")
ALL = [(kind, layout) for kind in CASES for layout in NAMES]
FAST = [(DropsOfOne, "megatron3-dp2"), *((kind, "fsdp2-dp2") for kind in (DropsByModule, Changes, Stops))]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout"), with_long(ALL, *(case for case in ALL if case not in FAST)))
def test_steps_are_those_of_one_process(kind: type[Descending], layout: str, nursery: Nursery) -> None:
    (expected,) = Pool(nursery, 1).run(run, None, kind, trainer=True)
    found = Pool(nursery, LAYOUTS[layout].ranks).run(run, layout, kind, trainer=True)[0]
    assert len(found) == len(expected)
    for i in range(1, len(found)):
        steps = [{name: w[i][name] - w[i - 1][name] for name in w[i]} for w in (expected, found)]
        assert any(d.any() for d in steps[0].values()) == any(d.any() for d in steps[1].values()), i
        check_gradients(*steps)


class LeavesOut(Descending):
    """Leaves batches out, among them the last ones of two steps."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if batch_idx % 4 != 3 and batch_idx not in (4, 6) else None


def leave_out(ours: bool) -> list[dict[str, Any]]:
    weights = Weights()
    strategy: Any = FSDP2TPStrategy() if ours else "auto"
    trainer = make_trainer(strategy, max_epochs=1, callbacks=[weights], accumulate_grad_batches=WINDOW)
    trainer.fit(LeavesOut(), batches(1, ROWS))
    return weights.found


def test_the_last_micro_batch_of_a_step_is_left_out(nursery: Nursery) -> None:
    """On one device, as on more Lightning has it for an error: the step takes the others."""
    expected, found = (Pool(nursery, 1).run(leave_out, ours, trainer=True)[0] for ours in (False, True))
    for before, after in zip(expected, found, strict=True):
        check_gradients(before, after)
    assert any((expected[WINDOW - 1][name] - weight).any() for name, weight in expected[0].items())


class HoldsAll(DropsByHand):
    """Leaves the last micro-batch of the second step out, with steps by hand, and so the reduction."""

    def accumulate(self, batch: list[Tensor], batch_idx: int) -> None:
        if batch_idx != 2 * WINDOW - 1:
            super().accumulate(batch, batch_idx)


def hold_all(layout: str, kind: type[Descending]) -> tuple[str, list[str]]:
    """Runs on each rank: the error, and the warnings of gradients that were held."""
    error = ""
    trainer = make_trainer(LAYOUTS[layout].make(), max_epochs=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(kind(), batches(LAYOUTS[layout].data_size, ROWS))
        except ValueError as raised:
            error = str(raised)
    return error, [str(each.message) for each in caught if "block_backward_sync()" in str(each.message)]


def test_steps_with_gradients_that_were_held(pool2: Pool) -> None:
    for error, told in pool2.run(hold_all, "fsdp2-dp2", HoldsAll, trainer=True):
        assert "take the last backward pass of a step outside of it" in error
        assert not told
    found = pool2.run(hold_all, "ddp-2", HoldsAll, trainer=True)
    assert [error for error, _ in found] == ["", ""]
    assert "replicas go apart" in found[0][1][0]
    assert pool2.run(hold_all, "ddp-2", DropsByHand, trainer=True) == [("", []), ("", [])]


class AsksAutograd(Descending):
    """Takes gradients by torch.autograd.grad, in steps by hand."""

    automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        torch.autograd.grad(self.loss(batch), list(self.parameters()))


@pytest.mark.slow
def test_gradients_by_autograd_tell_the_way_out(pool2: Pool) -> None:
    with pytest.raises(RankFailed, match=r"take them from parameter\.grad behind self\.manual_backward"):
        pool2.run(run, "fsdp2-dp2", AsksAutograd, trainer=True)
    pool2.run(run, "fsdp2-tp2", AsksAutograd, trainer=True)
