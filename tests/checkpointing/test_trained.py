"""A run that has switched adapters or thawed layers goes on with them when resumed, where nothing does so again."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from lightning_automodel.testing.pool import Pool
from tests.support.training import Recorder, batches, make_trainer, tiny_llama, whole_parameters, world_size

BATCHES, SAVED = 8, 6  # two epochs, and a batch in the middle of the second


class Saves(Recorder):
    """Saves at a hook when ``behind`` batches are through, if it is told where."""

    saves, behind, accumulate = "on_train_batch_end", SAVED, 1

    def __init__(self, path: Path | None) -> None:
        super().__init__()
        self.path = path

    def configure_callbacks(self) -> Any:
        saver = L.Callback()
        setattr(saver, self.saves, lambda trainer, *_: self.save(trainer.fit_loop.epoch_loop))
        return [saver]

    def save(self, loop: Any) -> None:
        if loop.batch_progress.total.processed == self.behind and self.path is not None:
            self.trainer.save_checkpoint(self.path)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)


# ---- adapters --------------------------------------------------------------------------------------------------------


class Adapted(Saves):
    """Begins with the first of two adapters."""

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(0)
            config = LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
            self.model = get_peft_model(tiny_llama(), config, "a")
            self.model.add_adapter("b", config)
            self.begin()

    def begin(self) -> None:
        self.model.set_adapter("a")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for n, p in self.named_parameters() if "lora_" in n], lr=0.3, momentum=0.9)


class TurnsOfEpochs(Adapted):
    """Trains one adapter per epoch; ``on_train_epoch_start`` is not called in the middle of one."""

    def on_train_epoch_start(self) -> None:
        self.model.set_adapter("ab"[self.current_epoch % 2])


class FromStepOn(Adapted):
    """Trains both from a step on, of which one layer does not train any more."""

    def on_train_batch_end(self, *args: Any) -> None:
        if self.trainer.global_step == SAVED - 1:
            self.model.base_model.set_adapter(["a", "b"])
            self.model.model.model.layers[0].requires_grad_(False)


class WithoutAdapters(Adapted):
    """Uses none of one adapter from a step on, and trains the norms on."""

    def begin(self) -> None:
        self.model.delete_adapter("b")
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("lora_" in name or "norm" in name)

    def on_train_batch_end(self, *args: Any) -> None:
        if self.trainer.global_step == SAVED - 1:
            self.model.base_model.disable_adapter_layers()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.3, momentum=0.9)


class Borrowing(Adapted):
    """Switches for the length of an evaluation, at the end of which it saves."""

    saves = "on_validation_end"

    def on_validation_start(self) -> None:
        self.model.set_adapter("b")

    def on_validation_end(self) -> None:
        self.model.set_adapter("a")


class BeginsWithBoth(Adapted):
    """What a user has changed since: it begins with both adapters, which counts."""

    def begin(self) -> None:
        self.model.base_model.set_adapter(["a", "b"])


# ---- layers ----------------------------------------------------------------------------------------------------------


class EachEpoch(Saves):
    """Trains all in the first epoch, and a block in the second."""

    def on_train_epoch_start(self) -> None:
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(self.current_epoch == 0 or "layers.1." in name)


class BeforeEvaluation(Saves):
    """Freezes a block at a hook of the batch ``SAVED``; saves in the evaluation behind it."""

    freezes, saves = "on_train_batch_end", "on_validation_end"

    def configure_callbacks(self) -> Any:
        freezer = L.Callback()
        setattr(freezer, self.freezes, lambda trainer, *_: self.freeze(trainer.fit_loop.epoch_loop.total_batch_idx))
        return [freezer, *super().configure_callbacks()]

    def freeze(self, batch: int) -> None:
        if batch + 1 == SAVED:
            self.model.model.layers[0].requires_grad_(False)


class ByEvaluation(BeforeEvaluation):
    """Freezes by what an evaluation has found."""

    freezes = "on_validation_end"


class BeforeBatch(BeforeEvaluation):
    """Saves before the hooks of the first batch that trains less have all been called."""

    saves = "on_train_batch_start"


class BetweenMicroBatches(BeforeEvaluation):
    """Freezes between two micro-batches of a step, and saves in the last one."""

    saves, behind, accumulate = "on_after_backward", SAVED + 1, 4


class InTurns(Saves):
    """Two optimizers in turns, whose parameters alone train; saves while the first of them does."""

    def __init__(self, path: Path | None) -> None:
        super().__init__(path)
        self.automatic_optimization = False

    def configure_callbacks(self) -> Any:
        return []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for number, optimizer in enumerate(self.optimizers()):  # type: ignore[arg-type]
            self.toggle_optimizer(optimizer)
            loss = super().training_step(batch, batch_idx)
            if number == 0:
                self.save(self.trainer.fit_loop.epoch_loop)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(block.parameters(), lr=0.3) for block in self.model.model.layers]


# ---- runs ------------------------------------------------------------------------------------------------------------


def train(kind: type[Saves], sizes: dict[str, Any], path: Path | None, resume: Path | None) -> dict[str, Any]:
    """Runs on each rank: all batches, or those behind a checkpoint."""
    module, size = kind(path), world_size() // sizes.get("tp", 1)
    run = make_trainer(sizes, max_epochs=2, val_check_interval=2, accumulate_grad_batches=kind.accumulate)
    run.fit(module, batches(size), batches(size), ckpt_path=resume)
    trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    return {"losses": module.losses, "parameters": whole_parameters(module), "trained": trained}


WHERE = [Borrowing, EachEpoch, BeforeEvaluation, ByEvaluation, BeforeBatch, BetweenMicroBatches, InTurns]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "is_folder"),
    [(TurnsOfEpochs, False), (FromStepOn, True), (WithoutAdapters, True), *((kind, True) for kind in WHERE)],
)
def test_what_was_switched_trains_on(kind: type[Saves], is_folder: bool, pool2: Pool, tmp_path: Path) -> None:
    """What was switched for good stays so, and only that, wherever it is saved."""
    path, saving = tmp_path / "1.ckpt", {"save_distributed_checkpoint": is_folder}
    whole = pool2.run(train, kind, saving, path, None, trainer=True)[0]
    again = pool2.run(train, kind, {"tp": 2}, None, path, trainer=True)[0]
    assert 0 < len(again["losses"]) < len(whole["losses"])
    assert again["losses"] == pytest.approx(whole["losses"][-len(again["losses"]) :], abs=1e-6)
    assert again["trained"] == whole["trained"]
    for name, value in whole["parameters"].items():
        torch.testing.assert_close(again["parameters"][name], value, atol=1e-6, rtol=0)


def test_what_the_code_says_now_counts(pool2: Pool, tmp_path: Path) -> None:
    """Where a run begins with other adapters than the one before did, it goes on with those."""
    pool2.run(train, TurnsOfEpochs, {}, tmp_path / "1.ckpt", None, trainer=True)
    again = pool2.run(train, BeginsWithBoth, {}, None, tmp_path / "1.ckpt", trainer=True)[0]
    assert {name.split(".")[-2] for name in again["trained"]} == {"a", "b"}
    assert len(again["losses"]) == BATCHES - SAVED
