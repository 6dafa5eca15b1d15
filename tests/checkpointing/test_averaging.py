"""Lightning's weight averaging, unchanged, on sharded weights: the averages of one device, through a resume."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor

from lightning_automodel import FSDP2TPStrategy
from lightning_automodel.testing.pool import Nursery, Pool
from tests.support.layouts import LAYOUTS
from tests.support.subjects import gather_part
from tests.support.training import Descending, Recorder, batches, make_trainer, world_size

SIZES: list[dict[str, Any]] = [{"tp": 2}, {"save_distributed_checkpoint": False}]
ARGUMENTS: dict[type, dict[str, Any]] = {
    EMAWeightAveraging: {"decay": 0.7},
    StochasticWeightAveraging: {"swa_lrs": 1e-2, "swa_epoch_start": 1, "annealing_epochs": 1},
}


def run(strategy: Any, kind: type, directory: Path, epochs: int, resume: Path | None = None) -> dict[str, Any]:
    """What is trained on, the averages that it ends with, and the last validation loss, of the averages."""
    module = Recorder()
    average = kind(**ARGUMENTS.get(kind, {}))
    saver = ModelCheckpoint(directory, filename="{epoch}", save_top_k=-1)
    size = 1 if strategy == "auto" else world_size() // strategy.get("tp", 1)
    if "layout" in strategy:
        size, strategy = LAYOUTS[strategy["layout"]].data_size, LAYOUTS[strategy["layout"]].make()
    trainer = make_trainer(strategy, max_epochs=epochs, enable_checkpointing=True, callbacks=[average, saver])
    trainer.fit(module, batches(size), batches(size), ckpt_path=resume)
    assert type(average) is kind
    loss = float(trainer.callback_metrics["val_loss"])
    return {"losses": module.losses, "average": average_of(module), "val_loss": loss}


def average_of(module: Recorder) -> dict[str, Any]:
    """What training ends with, on rank 0."""
    return {name: gather_part(parameter) for name, parameter in module.named_parameters()}


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((value - other[name]).abs().max()) for name, value in one.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layouts"),
    [
        (EMAWeightAveraging, [{"tp": 2, "save_distributed_checkpoint": False}]),
        *(pytest.param(kind, SIZES, marks=pytest.mark.long) for kind in (WeightAveraging, EMAWeightAveraging)),
    ],
)
def test_averages_are_those_of_one_device(
    nursery: Nursery, pool2: Pool, tmp_path: Path, kind: type, layouts: list[dict[str, Any]]
) -> None:
    one = Pool(nursery, 1).run(run, "auto", kind, tmp_path / "one", 2, trainer=True)[0]
    for sizes in layouts:
        path = tmp_path / repr(sizes)
        two = pool2.run(run, sizes, kind, path, 2, trainer=True)[0]
        assert two["losses"] == pytest.approx(one["losses"], abs=1e-5)
        assert two["val_loss"] == pytest.approx(one["val_loss"], abs=1e-5)
        assert difference(two["average"], one["average"]) < 1e-5
        again = pool2.run(run, sizes, kind, tmp_path / "x", 2, path / "epoch=0.ckpt", trainer=True)[0]
        assert again["losses"] == two["losses"][len(two["losses"]) // 2 :]
        assert difference(again["average"], two["average"]) == 0
    stored = torch.load(path / "epoch=1.ckpt")
    assert difference({n: stored["state_dict"][n] for n in two["average"]}, two["average"]) == 0
    assert difference({n: stored["current_model_state"][n] for n in two["average"]}, two["average"]) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "first"),
    [
        (EMAWeightAveraging, "megatron3-dp2"),
        pytest.param(EMAWeightAveraging, "megatron3-tp2", marks=pytest.mark.long),
        pytest.param(StochasticWeightAveraging, "megatron3-dp2", marks=pytest.mark.long),
        pytest.param(StochasticWeightAveraging, "megatron3-tp2", marks=pytest.mark.long),
    ],
)
def test_averages_go_to_megatron_fsdp_and_back(
    nursery: Nursery, pool2: Pool, tmp_path: Path, kind: type, first: str
) -> None:
    """Its ranks hold rows of slices, in numbers that no placement tells."""
    one = Pool(nursery, 1).run(run, {"layout": "ddp-1"}, kind, tmp_path / "one", 3, trainer=True)[0]
    resume = None
    for epoch, layout in enumerate([first, "fsdp2-dp2", first]):
        found = pool2.run(run, {"layout": layout}, kind, tmp_path / str(epoch), 3, resume, trainer=True)[0]
        assert found["losses"] == pytest.approx(one["losses"][epoch * len(one["losses"]) // 3 :], abs=1e-5)
        assert found["val_loss"] == pytest.approx(one["val_loss"], abs=1e-5)
        assert difference(one["average"], found["average"]) < 1e-5
        resume = tmp_path / f"{epoch}/epoch={epoch}.ckpt"


# ---- within an evaluation, when the module holds the average ---------------------------------------------------------


class EndsInEvaluation(Recorder):
    """Fails in the evaluation of its second epoch, in the middle of it, or saves there."""

    def __init__(self, how: str, path: Path) -> None:
        super().__init__()
        self.how, self.path = how, path

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        if self.how and (self.current_epoch, batch_idx) == (1, 1):
            if self.how == "error":
                raise ArithmeticError
            self.trainer.save_checkpoint(self.path)


def end_and_go_on(layout: str, is_folder: bool, how: str, directory: Path) -> dict[str, Any]:
    """Runs on each rank: what an undisturbed run and one that goes on end with, and the weights in the checkpoint."""
    path, found, size = directory / "saved.ckpt", {}, LAYOUTS[layout].data_size
    for name in ("whole", how, "again"):
        module = EndsInEvaluation(how if name == how else "", path)
        strategy = LAYOUTS[layout].make(save_distributed_checkpoint=is_folder)
        saver = [OnExceptionCheckpoint(directory, "saved")] * (name == "error")
        callbacks = [EMAWeightAveraging(decay=0.7), *saver]
        trainer = make_trainer(strategy, max_epochs=3, enable_checkpointing=bool(saver), callbacks=callbacks)
        with pytest.raises(ArithmeticError) if name == "error" else nullcontext():
            trainer.fit(module, batches(size), batches(size), ckpt_path=path if name == "again" else None)
        found[name] = {"losses": module.losses, "average": average_of(module)}
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "is_folder", "how"),
    [
        ("fsdp2-dp2", True, "error"),
        ("fsdp2-tp2", False, "saves"),
        pytest.param("ddp-2", False, "error", marks=pytest.mark.long),
        pytest.param("megatron3-dp2", True, "error", marks=pytest.mark.long),
    ],
)
def test_an_evaluation_that_is_saved_goes_on_with_what_trains(
    pool2: Pool, tmp_path: Path, layout: str, is_folder: bool, how: str
) -> None:
    found = pool2.run(end_and_go_on, layout, is_folder, how, tmp_path, trainer=True)[0]
    whole, again = found["whole"], found["again"]
    assert again["losses"] == pytest.approx(whole["losses"][-len(again["losses"]) :], abs=1e-6)
    assert difference(whole["average"], again["average"]) < 1e-6
    if not is_folder:
        saved = torch.load(tmp_path / "saved.ckpt", weights_only=True)
        assert difference(saved["state_dict"], saved["current_model_state"]) > 1e-4


# ---- behind a run ----------------------------------------------------------------------------------------------------


def save_behind_a_run(sizes: dict[str, Any] | None, kind: type, directory: Path) -> dict[str, Any]:
    """Runs on each rank: an epoch, an evaluation, a checkpoint by ``trainer.save_checkpoint``, and a run from there."""
    path, size = directory / "saved.ckpt", 1 if sizes is None else world_size() // sizes.get("tp", 1)
    found: dict[str, Any] = {}
    for epochs in (1, 2):
        module, average = Descending(), kind(**ARGUMENTS.get(kind, {}))
        strategy = "auto" if sizes is None else FSDP2TPStrategy(**sizes)
        trainer = make_trainer(strategy, max_epochs=epochs, callbacks=[average])
        resume: dict[str, Any] = {"ckpt_path": path, "weights_only": False} if epochs == 2 else {}
        trainer.fit(module, batches(size), batches(size), **resume)
        found[f"{epochs}"] = {"losses": module.losses, "average": average_of(module)}
        if epochs == 1:
            trainer.validate(module, batches(size))
            trainer.save_checkpoint(path)
    found["names"] = sorted(torch.load(path)["state_dict"]) if path.is_file() else None
    return found


@pytest.mark.parametrize("sizes", [{}, {"tp": 2, "save_distributed_checkpoint": False}])
def test_a_checkpoint_behind_a_run_goes_on_as_on_one_device(
    nursery: Nursery, pool2: Pool, sizes: dict[str, Any]
) -> None:
    """Lightning's own method writes it, and resumes with both the average and the number of its steps."""
    [one] = Pool(nursery, 1).run(save_behind_a_run, None, EMAWeightAveraging, trainer=True, with_directory=True)
    two = pool2.run(save_behind_a_run, sizes, EMAWeightAveraging, trainer=True, with_directory=True)[0]
    assert two["names"] in (None, one["names"])
    for epochs in ("1", "2"):
        assert two[epochs]["losses"] == pytest.approx(one[epochs]["losses"], abs=1e-5)
        assert difference(one[epochs]["average"], two[epochs]["average"]) < 1e-5
