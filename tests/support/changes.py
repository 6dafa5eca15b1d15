"""What steps of plain gradient descent change, in any layout."""

from functools import partial
from typing import Any

from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn

from lightning_automodel import FSDP2Config
from tests.support.layouts import LAYOUTS, Layout
from tests.support.subjects import gather_part
from tests.support.training import Recorder, batches, make_trainer

STEPS = 2
ALONE = "alone"
"""The layout of Lightning's own strategy for one device, which leaves parameters unused without a word."""
_ALONE = Layout(ranks=1, data_size=1, make=partial(SingleDeviceStrategy, "cpu"))


def changed(module: Recorder, initial: nn.Module, layout: str, levers: dict[str, Any]) -> dict[str, Tensor]:
    """Runs on each rank: train ``module``, whose ``model`` begins as ``initial``; rank 0 has the changes, by name."""
    chosen = _ALONE if layout == ALONE else LAYOUTS[layout]
    strategy = chosen.make(**({"config": FSDP2Config(**levers)} if levers else {}))
    trainer = make_trainer(strategy, max_steps=STEPS, accumulate_grad_batches=2, gradient_clip_val=0.5)
    trainer.fit(module, batches(chosen.data_size))
    before = {f"model.{name}": parameter.detach() for name, parameter in initial.named_parameters()}
    parts = {name: gather_part(parameter) for name, parameter in module.named_parameters()}
    return {name: value - before[name] for name, value in parts.items() if value is not None}
