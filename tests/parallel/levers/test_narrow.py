"""Parameters stored in bfloat16: an AdamW with Kahan compensation trains them as float32, on shards, and resumes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_automodel.testing.pool import Pool
from tests.support.training import Recorder, fit, whole


def compensated(parameters: Any) -> torch.optim.Optimizer:
    """Imported on ranks only: wherever it is, ``--model.optimizer=AdamW`` no longer says whose."""
    import optimi

    return optimi.AdamW(parameters, 1e-5, weight_decay=0.0)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "torch": lambda parameters: torch.optim.AdamW(parameters, 1e-5, (0.9, 0.99), 1e-6, weight_decay=0.0),
    "kahan": compensated,
}


class Narrow(Recorder):
    """Its optimizer has a name."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.optimizer = optimizer

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.optimizer](self.parameters())


def train(directory: Path, name: str, precision: str, **arguments: Any) -> dict[str, Tensor]:
    """Runs on each rank; whole parameters, and the bits that the optimizer keeps of them."""
    module = Narrow(name)
    _, found = fit({"tp": 2}, directory, module=module, precision=precision, **arguments)
    optimizer = module.trainer.optimizers[0]
    for name, parameter in module.named_parameters():
        if (lacking := optimizer.state[parameter].get("kahan_comp")) is not None:
            assert isinstance(lacking, DTensor)
            found[f"lacking {name}"] = whole(lacking)
    return found


def moved(found: dict[str, Tensor]) -> Tensor:
    """How far the weights of norms are from 1, where they began, and where bfloat16 has steps of 0.004."""
    names = [name for name in found if name.endswith("norm.weight") and "lacking" not in name]
    nothing = torch.zeros(())
    return torch.cat([(found[n].float() - 1) + found.get(f"lacking {n}", nothing).float() for n in names])


@pytest.mark.long
def test_small_changes_count(pool2: Pool, tmp_path: Path) -> None:
    wide = pool2.run(train, tmp_path, "torch", "bf16-mixed", trainer=True)
    lost = pool2.run(train, tmp_path, "torch", "bf16-true", trainer=True)
    kept = pool2.run(train, tmp_path / "kept", "kahan", "bf16-true", trainer=True)
    expected = moved(wide[0])
    assert expected.norm() > 0
    assert moved(lost[0]).norm() == 0
    assert (moved(kept[0]) - expected).norm() < 0.2 * expected.norm()
    assert all(torch.equal(value, kept[1][name]) for name, value in kept[0].items())
    checkpoint = tmp_path / "kept" / "epoch=1.ckpt"
    resumed = pool2.run(train, tmp_path / "resumed", "kahan", "bf16-true", resume=checkpoint, trainer=True)
    for name, value in kept[0].items():
        assert torch.equal(resumed[0][name], value), name
