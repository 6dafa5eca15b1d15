"""A checkpoint that is saved within a batch (by a hook, by an error): its optimizer step is done anew, nothing else."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_automodel.testing.pool import Pool
from tests.support.layouts import LAYOUTS
from tests.support.marks import with_long
from tests.support.training import Descending, Memory, batches, largest_difference, make_trainer, whole_parameters

ROWS = 24  # 6 batches of an epoch: two steps of three micro-batches


class Steps(Memory):
    """Keeps the steps of what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int | None] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.steps.append(step)


class Stopped(Descending):
    """Ends, or saves, in one micro-batch: when it begins, in the middle of its backward pass, or before its step."""

    def __init__(self, place: str = "", count: int = 0, path: Path | None = None) -> None:
        super().__init__()
        self.stop, self.path, self.count = (place, count), path, 0

    def configure_model(self) -> None:
        super().configure_model()
        if self.stop[0] == "backward":
            self.model.model.layers[0].mlp.register_full_backward_hook(self.in_backward)

    def in_backward(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self.reach("backward")

    def reach(self, place: str) -> None:
        if (place, self.count) == self.stop:
            if self.path is None:
                raise ArithmeticError(place)
            self.trainer.save_checkpoint(self.path)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.count += 1
        self.reach("start")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.reach("step")


def fit(layout: str, module: Stopped, resume: Path | None = None, *callbacks: Any) -> tuple[dict[str, Any], Steps]:
    steps = Steps()
    settings: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": 3, "log_every_n_steps": 1}
    trainer = make_trainer(
        LAYOUTS[layout].make(),
        callbacks=list(callbacks),
        logger=steps,
        enable_checkpointing=bool(callbacks),
        **settings,
    )
    trainer.fit(module, batches(LAYOUTS[layout].data_size, ROWS, shuffle=True), ckpt_path=resume)
    return {"losses": module.losses, "parameters": whole_parameters(module) if layout[0] != "m" else {}}, steps


def stop_and_go_on(layout: str, place: str, count: int, saves: bool, directory: Path) -> dict[str, Any]:
    """Runs on each rank."""
    whole, steps = fit(layout, Stopped())
    path = directory / "step=1.ckpt"
    if saves:
        fit(layout, Stopped(place, count, path))
    else:
        saver = ModelCheckpoint(directory, "{step}", save_on_exception=True, every_n_epochs=9)
        with pytest.raises(ArithmeticError, match=place):
            fit(layout, Stopped(place, count), None, saver)
    again, more = fit(layout, Stopped(), path)
    difference = largest_difference(again, whole) if again["parameters"] else 0.0
    return {"expected": whole["losses"][3:], "losses": again["losses"], "steps": (steps.steps[1:], more.steps)} | {
        "difference": difference
    }


CASES = [
    ("fsdp2-tp2", "start", 5, True),
    ("fsdp2-dp2", "backward", 5, False),
    ("megatron3-dp2", "start", 6, False),
    ("fsdp2-dp2", "start", 6, False),
    ("ddp-2", "backward", 6, False),
    ("ddp-2", "step", 6, True),
    ("megatron3-dp2", "start", 5, True),
]


@pytest.mark.parametrize(
    ("layout", "place", "count", "saves"),
    with_long(CASES, *CASES[3:]),
)
def test_the_step_is_done_anew(pool2: Pool, tmp_path: Path, layout: str, place: str, count: int, saves: bool) -> None:
    for found in pool2.run(stop_and_go_on, layout, place, count, saves, tmp_path, trainer=True):
        assert found["losses"] == pytest.approx(found["expected"], abs=1e-6)
        assert found["difference"] < 1e-6
        assert found["steps"][0] == found["steps"][1]
