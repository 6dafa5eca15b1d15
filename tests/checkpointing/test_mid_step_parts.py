"""A checkpoint between the micro-batches of a step in which ranks have gradients of different parameters."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_automodel import DDPConfig, DDPStrategy, FSDP2Config, FSDP2TPStrategy
from lightning_automodel.testing.pool import Nursery, Pool
from tests.strategies.users.test_parts_of_models import ListsOfExperts, Tasks, micro_batches
from tests.support.marks import with_long
from tests.support.training import SaveAfter, largest_difference, make_trainer, whole_parameters, world_size

ACCUMULATE = 2
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp": {},
    "replicas": {"dp_replicate": 2},
    "reduced each time": {"config": FSDP2Config(defer_fsdp_grad_sync=False)},
    "DDP": {},
    "dp-tp": {"dp_shard": 2, "tp": 2},
}


class TwoTasks(Tasks):
    """Samples of rank 0 choose one head, and those of rank 1 the other."""

    def loss(self, batch: dict[str, Any]) -> Any:  # type: ignore[override]
        return super().loss({**batch, "number": batch["number"] % 2})


SUBJECTS: dict[str, type[Tasks]] = {"heads": TwoTasks, "experts": ListsOfExperts}


def run(kind: str, layout: str, path: Path, resume: Path | None) -> dict[str, Any]:
    """Runs on each rank."""
    module = SUBJECTS[kind]()
    sizes = LAYOUTS[layout]
    strategy: Any = FSDP2TPStrategy(**sizes)
    if layout == "DDP":
        strategy = DDPStrategy(config=DDPConfig(find_unused_parameters=True))
    accumulate = ACCUMULATE * 2 // (world_size() // sizes.get("tp", 1))
    callbacks = [] if resume else [SaveAfter(path, 3 * accumulate // 2)]
    trainer = make_trainer(
        strategy, callbacks=callbacks, max_epochs=1, accumulate_grad_batches=accumulate, gradient_clip_val=0.5
    )
    trainer.fit(module, micro_batches(), ckpt_path=resume)
    return {"gradients": module.gradients, "parameters": whole_parameters(module)}


CASES = [(kind, layout) for kind in SUBJECTS for layout in LAYOUTS]
LONG = [case for case in CASES if case not in (("heads", "dp"), ("heads", "DDP"), ("experts", "dp"))]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layout"), with_long(CASES, *LONG))
def test_it_goes_on_where_it_was(kind: str, layout: str, nursery: Nursery, tmp_path: Path) -> None:
    pool = Pool(nursery, 4 if layout == "dp-tp" else 2)
    whole = pool.run(run, kind, layout, tmp_path / "mid.ckpt", None, trainer=True)
    again = pool.run(run, kind, layout, tmp_path / "mid.ckpt", tmp_path / "mid.ckpt", trainer=True)
    for one, many in zip(whole, again, strict=True):
        expected = one["gradients"][-len(many["gradients"]) :]
        for before, after in zip(expected, many["gradients"], strict=True):
            assert before.keys() == after.keys()
            for name, gradient in before.items():
                torch.testing.assert_close(after[name], gradient, rtol=1e-4, atol=1e-6)
        assert largest_difference(many, one) < 1e-5
