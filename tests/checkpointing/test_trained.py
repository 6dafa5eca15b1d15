"""A run that has switched adapters or thawed layers goes on with them when resumed, where nothing does so again."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from lightning_automodel.testing.pool import Pool
from tests.support.training import Recorder, SaveAfter, batches, make_trainer, tiny_llama, whole_parameters, world_size

BATCHES, SAVED = 8, 6  # two epochs, and a batch in the middle of the second


class TurnsOfEpochs(Recorder):
    """Trains one adapter per epoch; ``on_train_epoch_start`` is not called in the middle of one."""

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(0)
            config = LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
            self.model = get_peft_model(tiny_llama(), config, "a")
            self.model.add_adapter("b", config)
            self.begin()

    def begin(self) -> None:
        self.model.set_adapter("a")

    def on_train_epoch_start(self) -> None:
        self.model.set_adapter("ab"[self.current_epoch % 2])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for n, p in self.named_parameters() if "lora_" in n], lr=0.3, momentum=0.9)


class FromStepOn(TurnsOfEpochs):
    """Trains both from a step on, of which one layer does not train any more."""

    def on_train_epoch_start(self) -> None:
        pass

    def on_train_batch_end(self, *args: Any) -> None:
        if self.trainer.global_step == SAVED - 1:
            self.model.base_model.set_adapter(["a", "b"])
            self.model.model.model.layers[0].requires_grad_(False)


class Borrowing(TurnsOfEpochs):
    """Switches for the length of an evaluation, at the end of which a callback saves."""

    def on_train_epoch_start(self) -> None:
        pass

    def on_validation_start(self) -> None:
        self.model.set_adapter("b")

    def on_validation_end(self) -> None:
        self.model.set_adapter("a")


class Freezes(Recorder):
    """Trains all in the first epoch, and a block in the second."""

    def on_train_epoch_start(self) -> None:
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(self.current_epoch == 0 or "layers.1." in name)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)


class BeginsWithBoth(TurnsOfEpochs):
    """What a user has changed since: it begins with both adapters, which counts."""

    def begin(self) -> None:
        self.model.base_model.set_adapter(["a", "b"])

    def on_train_epoch_start(self) -> None:
        pass


class SaveInValidation(L.Callback):
    """Saves at the end of the evaluation behind the batch ``SAVED``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.global_step == SAVED:
            trainer.save_checkpoint(self.path)


class Anew(Recorder):
    """Freezes a block in a hook; saves at another one when ``behind`` batches are through."""

    freezes, saves, behind = "on_train_batch_end", "on_validation_end", SAVED
    accumulate = 1

    def __init__(self, path: Path | None) -> None:
        super().__init__()
        self.path = path

    def configure_callbacks(self) -> Any:
        freezer, saver = L.Callback(), L.Callback()
        setattr(freezer, self.freezes, lambda trainer, *_: self.freeze(trainer.fit_loop.epoch_loop.total_batch_idx))
        setattr(saver, self.saves, lambda trainer, *_: self.save(trainer.fit_loop.epoch_loop))
        return [freezer, saver]

    def freeze(self, batch: int) -> None:
        if batch + 1 == SAVED:
            self.model.model.layers[0].requires_grad_(False)

    def save(self, loop: Any) -> None:
        if loop.batch_progress.total.processed == self.behind and self.path is not None:
            self.trainer.save_checkpoint(self.path)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)


class BehindEvaluation(Anew):
    """Freezes by what an evaluation has found."""

    freezes = "on_validation_end"


class BeforeBatch(Anew):
    """Saves before the hooks of the first batch that trains less have all been called."""

    saves = "on_train_batch_start"


class BetweenMicroBatches(Anew):
    """Freezes between two micro-batches of a step, and saves in the last one."""

    saves, behind, accumulate = "on_after_backward", SAVED + 1, 4


class InTurns(Anew):
    """Two optimizers in turns, whose parameters alone train; saves while one of them does."""

    def __init__(self, path: Path | None) -> None:
        super().__init__(path)
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            self.toggle_optimizer(optimizer)
            loss = super().training_step(batch, batch_idx)
            if self.path is not None and len(self.losses) == 2 * SAVED + 1:
                self.trainer.save_checkpoint(self.path)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def freeze(self, batch: int) -> None:
        pass

    def save(self, loop: Any) -> None:
        pass

    def configure_optimizers(self) -> Any:
        blocks = self.model.model.layers
        return [torch.optim.SGD(block.parameters(), lr=0.3) for block in blocks]


def train_anew(kind: type[Anew], sizes: dict[str, Any], path: Path | None, resume: Path | None) -> dict[str, Any]:
    """Runs on each rank: as ``train``."""
    module = kind(path)
    run = make_trainer(sizes, max_epochs=2, val_check_interval=2, accumulate_grad_batches=kind.accumulate)
    size = world_size() // sizes.get("tp", 1)
    run.fit(module, batches(size), batches(size), ckpt_path=resume)
    return {"losses": module.losses, "parameters": whole_parameters(module)}


def train(kind: type[Recorder], sizes: dict[str, Any], path: Path | None, resume: Path | None) -> dict[str, Any]:
    """Runs on each rank: all batches, or those behind a checkpoint."""
    module = kind()
    savers: list[L.Callback] = []
    if path is not None:
        savers = [SaveInValidation(path) if kind is Borrowing else SaveAfter(path, SAVED)]
    run = make_trainer(sizes, max_epochs=2, val_check_interval=2, callbacks=savers)
    size = world_size() // sizes.get("tp", 1)
    run.fit(module, batches(size), batches(size), ckpt_path=resume)
    in_use = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    return {"losses": module.losses, "parameters": whole_parameters(module), "in use": in_use}


@pytest.mark.parametrize(
    ("kind", "is_folder"), [(TurnsOfEpochs, False), (FromStepOn, True), (Borrowing, True), (Freezes, True)]
)
def test_what_was_switched_trains_on(kind: type[Recorder], is_folder: bool, pool2: Pool, tmp_path: Path) -> None:
    path, saving = tmp_path / "1.ckpt", {"save_distributed_checkpoint": is_folder}
    whole = pool2.run(train, kind, saving, path, None, trainer=True)[0]
    again = pool2.run(train, kind, {"tp": 2}, None, path, trainer=True)[0]
    assert again["losses"] == pytest.approx(whole["losses"][SAVED:], abs=1e-6)
    assert again["in use"] == whole["in use"]
    for name, value in whole["parameters"].items():
        torch.testing.assert_close(again["parameters"][name], value, atol=1e-6, rtol=0)


def test_what_the_code_says_now_counts(pool2: Pool, tmp_path: Path) -> None:
    """Where a run begins with other adapters than the one before did, it goes on with those."""
    pool2.run(train, TurnsOfEpochs, {}, tmp_path / "1.ckpt", None, trainer=True)
    again = pool2.run(train, BeginsWithBoth, {}, None, tmp_path / "1.ckpt", trainer=True)[0]
    assert {name.split(".")[-2] for name in again["in use"]} == {"a", "b"}
    assert len(again["losses"]) == BATCHES - SAVED


@pytest.mark.parametrize("kind", [Anew, BehindEvaluation, BeforeBatch, BetweenMicroBatches, InTurns])
def test_wherever_it_is_saved(kind: type[Anew], pool2: Pool, tmp_path: Path) -> None:
    """Behind a switch, within an evaluation or a batch: what was frozen for good stays so, and only that."""
    path = tmp_path / "1.ckpt"
    whole = pool2.run(train_anew, kind, {}, path, None, trainer=True)[0]
    again = pool2.run(train_anew, kind, {"tp": 2}, None, path, trainer=True)[0]
    assert 0 < len(again["losses"]) < len(whole["losses"])
    assert again["losses"] == pytest.approx(whole["losses"][-len(again["losses"]) :], abs=1e-6)
    for name, value in whole["parameters"].items():
        torch.testing.assert_close(again["parameters"][name], value, atol=1e-6, rtol=0)
