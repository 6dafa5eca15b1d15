"""Where in a run a checkpoint is saved: between any two batches, what follows is the run that was not stopped."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_automodel.testing.pool import Nursery, Pool
from tests.support.training import GLOBAL_BATCH, Recorder, batches, make_trainer, world_size

Step = tuple[int, float, float]


class Numbered(Recorder):
    """Keeps the epoch, the loss and a random number of each batch, and in which steps it validates."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.validated: list[int] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.steps.append((self.trainer.current_epoch, self.losses[-1], self.draws[-1]))
        return loss

    def on_validation_epoch_end(self) -> None:
        self.validated.append(self.trainer.global_step)


class SaveAt(Callback):
    """Saves in a hook, at the call that finds the trainer in an epoch with a number of batches through."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.saved: dict[str, int] = {}  # names of checkpoints: batches that are through

    def save(self, place: str, trainer: L.Trainer, module: Numbered) -> None:
        name = f"{place} {len(module.steps)}"
        trainer.save_checkpoint(self.directory / name)
        self.saved[name] = len(module.steps)

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        self.save("train start", trainer, module)

    def on_train_epoch_start(self, trainer: L.Trainer, module: Any) -> None:
        self.save("epoch start", trainer, module)

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
        self.save("batch end", trainer, module)

    def on_validation_end(self, trainer: L.Trainer, module: Any) -> None:
        self.save("validation end", trainer, module)

    def on_train_epoch_end(self, trainer: L.Trainer, module: Any) -> None:
        self.save("epoch end", trainer, module)


def go_on_from_everywhere(directory: Path, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the places after which a run is another one."""
    different: dict[str, Any] = {}

    def fit(resume: Path | None, *callbacks: Callback) -> Numbered:
        L.seed_everything(5, verbose=False)
        module, size = Numbered(), world_size()
        settings = {"max_epochs": 2, "accumulate_grad_batches": 2, **arguments}
        trainer = make_trainer({}, callbacks=list(callbacks), **settings)
        trainer.fit(module, batches(size, shuffle=True), batches(size, 2 * GLOBAL_BATCH), ckpt_path=resume)
        return module

    saver = SaveAt(directory)
    whole = fit(None, saver)
    for name, through in saver.saved.items():
        again = fit(directory / name)
        if again.steps != whole.steps[through:] or not set(again.validated) <= set(whole.validated):
            different[name] = again.steps, whole.steps[through:]
    return different


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [{"val_check_interval": 2}, {"limit_val_batches": 0}], ids=["validates", "not"])
def test_a_run_goes_on_with_its_draws(nursery: Nursery, tmp_path: Path, arguments: dict[str, Any]) -> None:
    """Also from within the last validation of an epoch, and from the start of an epoch."""
    assert Pool(nursery, 1).run(go_on_from_everywhere, tmp_path, arguments, trainer=True) == [{}]
