"""Gradients that wait for a step, and precisions that scale the loss: they add to those of the run that goes on."""

from pathlib import Path
from typing import Any

import pytest

from lightning_automodel.strategies.precision import FSDP2Precision
from lightning_automodel.testing.pool import Pool
from tests.support.layouts import LAYOUTS
from tests.support.training import Descending, SaveAfter, batches, largest_difference, make_trainer, whole_parameters


def run(layout: str, precision: Any, path: Path, resume: Path | None = None) -> dict[str, Any]:
    """Runs on each rank; saves behind the first micro-batch of the second step. Lightning has no float16 on CPU."""
    module = Descending()
    plugin = FSDP2Precision(precision)
    trainer = make_trainer(
        LAYOUTS[layout].make(),
        max_epochs=1,
        accumulate_grad_batches=2,
        plugins=plugin,
        callbacks=[] if resume else [SaveAfter(path, 3)],
    )
    trainer.fit(module, batches(LAYOUTS[layout].data_size), ckpt_path=resume)
    return {"losses": module.losses, "parameters": whole_parameters(module), "scale": plugin.state_dict().get("scale")}


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
