"""A loss or a gradient that is not finite: the run ends before the step, or the step is left out, on all ranks."""

import logging
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from lightning.pytorch.tuner import Tuner
from torch import Tensor

from lightning_automodel import DDPStrategy, FSDP2TPStrategy
from lightning_automodel.config import DDPConfig, FSDP2Config
from lightning_automodel.strategies import precision
from lightning_automodel.strategies.steps import finite
from lightning_automodel.strategies.steps.finite import FiniteGuard
from lightning_automodel.testing.pool import Pool
from tests.support.layouts import LAYOUTS
from tests.support.training import Recorder, batches, make_trainer, whole_parameters, world_size
from tests.support.waiting import Moves, played_cuda

STEPS, BAD = 4, 2


class Broken(Recorder):
    """Whose rank 1 meets a bad micro-batch in one step: the second of two."""

    def __init__(self, value: float, optimizer: str, by_hand: bool) -> None:
        super().__init__()
        self.value, self.optimizer, self.by_hand = value, optimizer, by_hand
        self.automatic_optimization = not by_hand
        self.before: dict[str, Tensor] = {}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        if batch_idx % 2 == 0:
            self.before = whole_parameters(self.model)
        loss = self.model(input_ids=batch[0], labels=batch[0]).loss
        if batch_idx == 2 * BAD + 1 and self.trainer.strategy.data_rank == self.trainer.strategy.data_size - 1:
            loss = loss * self.value
        if not self.by_hand:
            return loss
        self.manual_backward(loss / 2)
        if batch_idx % 2 == 1:
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()
        return None

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        if self.by_hand:
            return [torch.optim.SGD(half, lr=0.1) for half in (parameters[:5], parameters[5:])]
        return torch.optim.AdamW(parameters, lr=1e-2, fused=self.optimizer == "fused")


def strategy_of(kind: str, policy: str) -> Any:
    if kind == "ddp":
        return DDPStrategy(config=DDPConfig(nonfinite=policy))
    return FSDP2TPStrategy(tp=2 if kind == "tp" else 1, config=FSDP2Config(nonfinite=policy))


def train(
    kind: str, policy: str, value: float, optimizer: str = "", by_hand: bool = False
) -> tuple[str, bool, list[bool]]:
    """Runs on each rank: the error, whether the weights are those before the bad step, and which are finite."""
    module = Broken(value, optimizer, by_hand)
    accumulation = {} if by_hand else {"accumulate_grad_batches": 2}
    run = make_trainer(strategy_of(kind, policy), max_epochs=1, limit_train_batches=2 * STEPS, **accumulation)
    message = ""
    try:
        run.fit(module, batches(1 if kind == "tp" else world_size(), count=128))
    except RuntimeError as error:
        message = str(error)
    after = whole_parameters(module.model)
    kept = all(torch.equal(after[name], value) for name, value in module.before.items())
    return message, kept, [bool(torch.isfinite(value).all()) for value in after.values()]


def deferred() -> list[tuple[str, bool, list[bool]]]:
    """Runs on each rank: as on an accelerator, where the optimizer leaves its step out and the host looks later."""
    original, precision.can_defer = precision.can_defer, lambda optimizer: True
    try:
        return [train("fsdp", policy, torch.nan, "fused") for policy in ("error", "skip")]
    finally:
        precision.can_defer = original


@pytest.mark.parametrize("kind", ["fsdp", "tp", "ddp"])
def test_a_run_ends_before_the_step(kind: str, pool2: Pool) -> None:
    rank = 0 if kind == "tp" else 1
    for message, kept, are_finite in pool2.run(train, kind, "error", torch.nan, trainer=True):
        assert f"optimizer step {BAD}: the loss of micro-batch 1 of rank {rank} is nan" in message
        assert "the gradient of model.model.embed_tokens.weight and" in message
        assert kept
        assert all(are_finite)


@pytest.mark.slow
def test_a_step_is_left_out(pool2: Pool) -> None:
    for message, kept, are_finite in pool2.run(train, "fsdp", "skip", torch.inf, trainer=True):
        assert message == ""
        assert not kept  # the steps after it were taken
        assert all(are_finite)
    assert not all(pool2.run(train, "fsdp", "ignore", torch.inf, trainer=True)[0][2])


def test_optimizers_that_are_called_by_hand(pool2: Pool) -> None:
    for message, kept, _ in pool2.run(train, "fsdp", "error", torch.nan, "", True, trainer=True):
        assert f"optimizer step {2 * BAD}: the loss of micro-batch 1 of rank 1 is nan" in message
        assert kept


def test_an_optimizer_that_looks_by_itself(pool2: Pool) -> None:
    for ended, skipped in pool2.run(deferred, trainer=True):
        assert f"optimizer step {BAD}: the loss of micro-batch 1 of rank 1 is nan" in ended[0]
        assert ended[1]
        assert skipped[0] == ""
        assert not skipped[1]
        assert all(ended[2] + skipped[2])


class Unsynced(Recorder):
    """Lowers its learning rate by a loss that each rank has for itself."""

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", float(self.global_rank * self.current_epoch))

    def configure_optimizers(self) -> Any:
        groups = [{"params": [p]} for p in self.parameters()]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, mode="max", factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


def lower_alone(kind: str) -> tuple[str, int]:
    """Runs on each rank: the error, and the steps before it."""
    run = make_trainer(strategy_of(kind, "skip"), max_epochs=4)
    with pytest.raises(RuntimeError) as caught:
        run.fit(Unsynced(), batches(2), batches(2))
    return str(caught.value), run.global_step


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_rates_that_differ_are_an_error(kind: str, pool2: Pool) -> None:
    for message, steps in pool2.run(lower_alone, kind, trainer=True):
        assert "optimizer step 8: the learning rate of group 0 is 0.05 on rank 0, 0.1 on rank 1" in message
        assert "sync_dist=True" in message
        assert steps == 8


def test_policies() -> None:
    for config in (FSDP2Config, DDPConfig):
        with pytest.raises(ValueError, match="nonfinite='warn' is not one of 'error', 'skip', 'ignore'"):
            config(nonfinite="warn")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_one_element_of_any_dtype_is_seen(dtype: torch.dtype, value: float) -> None:
    module = L.LightningModule()
    module.trainer = L.Trainer(accelerator="cpu", barebones=True)
    module.parts = torch.nn.ParameterList([torch.zeros(shape, dtype=dtype) for shape in ((8, 40), (), (0, 3), (8, 40))])
    for part in module.parts:
        part.grad = torch.full_like(part, torch.finfo(dtype).max)  # finite, and its square is not
    module.parts[3].grad[7, 39] = value
    finding = FiniteGuard("error").inspect(torch.optim.SGD(module.parameters(), lr=1.0), module)
    assert finding.vector.tolist() == [0, 0, 0, 1, 0]


class Landed:
    """In the place of ``Arriving``: notes what was sent, which says when it is read that nothing was found."""

    sent: ClassVar[list[Tensor]] = []

    def __init__(self, tensor: Tensor) -> None:
        self.sent.append(tensor)

    def read(self) -> bool:
        return False


@pytest.mark.parametrize("has_gradient", [(True, True, True), (True, False, True), (False, False, False)], ids=str)
def test_the_host_does_not_wait_for_what_is_found(
    has_gradient: tuple[bool, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finite, "Arriving", Landed)
    monkeypatch.setattr(Landed, "sent", [])
    module = L.LightningModule()
    module.trainer = L.Trainer(accelerator="cpu", barebones=True)
    with played_cuda():
        parameters = [torch.nn.Parameter(torch.zeros(3, device="cuda")) for _ in has_gradient]
        for parameter, has in zip(parameters, has_gradient, strict=True):
            parameter.grad = torch.zeros_like(parameter) if has else None
        guard, optimizer = FiniteGuard("error"), torch.optim.AdamW(parameters)
        guard.record(torch.zeros((), device="cuda"))
        with Moves() as moves:
            for _ in range(3):  # the second one looks at what the first one has found, and a number of it is an error
                guard.defer(guard.inspect(optimizer, module), optimizer)
    assert optimizer.found_inf.shape == ()
    assert optimizer.found_inf is Landed.sent[-1]  # copied where it was found: behind it comes the next backward pass
    assert len(Landed.sent) == 3
    assert not moves.found


class Searched(Recorder):
    """Whose losses are infinite from a step of a search on."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * (torch.inf if self.global_step >= 14 else 1)


def search(layout: str, directory: Path) -> tuple[int, float | None, list[Path], list[str], bool]:
    """Runs on each rank: how many rates were tried, the one found, what lies on disk, warnings, and whether weights are
    those before.
    """
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    finite.logger.addHandler(handler)
    module, chosen = Searched(), LAYOUTS[layout]
    trainer = make_trainer(chosen.make(), max_epochs=50, default_root_dir=directory)
    found = Tuner(trainer).lr_find(
        module, batches(chosen.data_size), num_training=20, early_stop_threshold=None, update_attr=False
    )
    assert found is not None
    is_restored = all(bool(value.isfinite().all()) for value in whole_parameters(module).values())
    ends = [message for message in said if "ends here" in message]
    return len(found.results["loss"]), found.suggestion(), list(directory.iterdir()), ends, is_restored


@pytest.mark.parametrize("layout", ["fsdp2-dp2", "ddp-2"])
def test_a_search_of_a_rate_ends(layout: str, tmp_path: Path, pool2: Pool) -> None:
    """Lightning's own goes on with weights that are not finite, and suggests a rate of those before."""
    for tried, rate, files, said, is_restored in pool2.run(search, layout, tmp_path, trainer=True):
        assert tried == 15
        assert rate
        assert files == []
        assert len(said) == 1
        assert "optimizer step 14: the loss of micro-batch 0 of rank 0 is inf" in said[0]
        assert is_restored
