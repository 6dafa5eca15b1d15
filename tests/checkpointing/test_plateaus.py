"""A ``ReduceLROnPlateau`` in a run that resumes: the learning rates of the run that was not stopped."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_automodel.testing.pool import Nursery, Pool
from tests.support.marks import with_long
from tests.support.training import Recorder, SaveAfter, batches, make_trainer, world_size

BATCHES, EPOCHS, MIDDLE = 4, 4, 7


class Monitoring(Recorder):
    """Halves its rate behind every epoch, or so many batches, since nothing is ever better."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.how: dict[str, Any] = {"monitor": "val_loss", **how}
        self.rates: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.rates.append(self.optimizers().param_groups[0]["lr"])  # type: ignore[union-attr]
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, on_epoch=True, on_step=False, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, **self.how}}


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "behind a validation": ({}, {}),
    "every second epoch": ({"frequency": 2}, {}),
    "of training": ({"monitor": "train_loss"}, {"save_on_train_epoch_end": True}),
    "by steps, between validations": ({"interval": "step", "frequency": 2, "strict": False}, {}),
}


def run(how: dict[str, Any], saver: dict[str, Any], directory: Path, resume: str | None, by_steps: bool) -> Any:
    """Runs on each rank: the rate of each batch, and the last one."""
    module = Monitoring(**how)
    saves = ModelCheckpoint(directory, filename="{epoch}", save_top_k=-1, **saver)
    end: dict[str, Any] = {"max_steps": EPOCHS * BATCHES} if by_steps else {"max_epochs": EPOCHS}
    callbacks = [saves, *([] if resume else [SaveAfter(directory / "mid.ckpt", MIDDLE)])]
    trainer = make_trainer({}, enable_checkpointing=True, callbacks=callbacks, **end)
    trainer.fit(module, batches(world_size()), batches(world_size()), ckpt_path=resume and directory / resume)
    return [*module.rates, trainer.optimizers[0].param_groups[0]["lr"]]


EVERY = [(case, by_steps) for case in CASES for by_steps in (False, True)]
QUICK = [("behind a validation", True), ("every second epoch", False)]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "by_steps"), with_long(EVERY, *(case for case in EVERY if case not in QUICK)))
def test_rates_are_those_of_the_run_that_was_not_stopped(
    case: str, by_steps: bool, nursery: Nursery, tmp_path: Path
) -> None:
    """From within an epoch, from its end, and from the end of an epoch of a run that had resumed."""
    how, saver = CASES[case]
    one = Pool(nursery, 1)
    whole = one.run(run, how, saver, tmp_path, None, by_steps, trainer=True)[0]
    assert len(set(whole)) > 2
    for resume, done in (("mid.ckpt", MIDDLE), ("epoch=1.ckpt", 2 * BATCHES), ("epoch=2.ckpt", 3 * BATCHES)):
        found = one.run(run, how, saver, tmp_path, resume, by_steps, trainer=True)[0]
        assert found == pytest.approx(whole[done:]), resume


@pytest.mark.slow
def test_ranks_agree(nursery: Nursery, pool2: Pool, tmp_path: Path) -> None:
    whole = Pool(nursery, 1).run(run, {}, {}, tmp_path, None, False, trainer=True)[0]
    for resume, done in (("mid.ckpt", MIDDLE), ("epoch=1.ckpt", 2 * BATCHES)):
        for found in pool2.run(run, {}, {}, tmp_path, resume, False, trainer=True):
            assert found == pytest.approx(whole[-len(found) :]), (resume, done)
