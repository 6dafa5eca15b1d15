"""Gradients that wait for a step, and precisions that scale the loss: they add to those of the run that goes on."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_automodel.strategies.precision import FSDP2Precision
from lightning_automodel.testing.pool import Pool
from tests.support.layouts import LAYOUTS
from tests.support.training import Descending, SaveAfter, batches, largest_difference, make_trainer, whole_parameters


def run(
    layout: str, precision: Any, path: Path, resume: Path | None = None, kind: type[Descending] = Descending
) -> dict[str, Any]:
    """Runs on each rank; saves behind the first micro-batch of the second step. Lightning has no float16 on CPU."""
    module = kind()
    plugin = FSDP2Precision(precision)
    trainer = make_trainer(
        LAYOUTS[layout].make(),
        max_epochs=1,
        accumulate_grad_batches=2 if module.automatic_optimization else 1,
        plugins=plugin,
        callbacks=[] if resume else [SaveAfter(path, 3)],
    )
    trainer.fit(module, batches(LAYOUTS[layout].data_size), ckpt_path=resume)
    return {"losses": module.losses, "parameters": whole_parameters(module), "scale": plugin.state_dict().get("scale")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "saved", "resumed"),
    [
        ("fsdp2-dp2", "16-mixed", "32-true"),
        ("ddp-2", "16-mixed", "bf16-true"),
        ("fsdp2-tp2", "bf16-mixed", "16-mixed"),
        ("ddp-2", "16-mixed", "16-mixed"),
    ],
)
def test_they_are_at_the_scale_of_the_run_that_goes_on(
    pool2: Pool, tmp_path: Path, layout: str, saved: str, resumed: str
) -> None:
    path = tmp_path / "mid.ckpt"
    whole = pool2.run(run, layout, saved, path, trainer=True)[0]
    again = pool2.run(run, layout, resumed, path, path, trainer=True)[0]
    assert again["scale"] == (65536 if resumed == "16-mixed" else None)
    assert again["losses"] == pytest.approx(whole["losses"][3:], abs=2e-2)
    assert largest_difference(again, whole) < 2e-3  # of what the second half of a step adds in narrow precision


# ---- gradients that were clipped, and so unscaled, before a later batch steps on them --------------------------------


class ClippedEarly(Descending):
    """Clips gradients of one of two optimizers, and steps in the next batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        clipped, other = self.optimizers()  # type: ignore[misc]
        if batch_idx % 2 == 0:
            self.manual_backward(self.loss(batch))
            self.clip_gradients(clipped, 0.3, "norm")
            return
        for optimizer in (clipped, other):
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        return [torch.optim.SGD(each, lr=0.1) for each in (parameters[::2], parameters[1::2])]


@pytest.mark.parametrize(
    ("layout", "resumed"),
    [("fsdp2-dp2", "16-mixed"), ("fsdp2-dp2", "32-true"), ("ddp-2", "16-mixed")],
)
def test_what_was_unscaled_is_not_unscaled_again(pool2: Pool, tmp_path: Path, layout: str, resumed: str) -> None:
    path = tmp_path / "mid.ckpt"
    whole = pool2.run(run, layout, "16-mixed", path, None, ClippedEarly, trainer=True)[0]
    again = pool2.run(run, layout, resumed, path, path, ClippedEarly, trainer=True)[0]
    assert largest_difference(again, whole) == 0
