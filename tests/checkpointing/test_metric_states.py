"""Metrics that go into checkpoints (``persistent(True)``) and are resumed within an epoch count every sample once."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torchmetrics import CatMetric, MaxMetric, MeanMetric, SumMetric

from lightning_automodel.testing.pool import Nursery, Pool
from tests.support.training import Recorder, SaveAfter, batches, make_trainer, world_size


class Counting(Recorder):
    """Counts the ids of an epoch in metrics of four kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.sum, self.all, self.most, self.mean = SumMetric(), CatMetric(), MaxMetric(), MeanMetric()
        for metric in (self.sum, self.all, self.most, self.mean):
            metric.persistent(True)
        self.found: list[Any] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        for metric in (self.sum, self.all, self.most, self.mean):
            metric.update(batch[0].float())
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.found = [float(self.sum.compute()), float(self.most.compute()), float(self.mean.compute())]
        self.found += sorted(self.all.compute().flatten().tolist())


def count(arguments: dict[str, Any], path: Path, *, resumes: bool) -> list[Any]:
    module, size = Counting(), world_size() // arguments.get("tp", 1)
    trainer = make_trainer(arguments, max_epochs=1, callbacks=[] if resumes else [SaveAfter(path, 2)])
    trainer.fit(module, batches(size), ckpt_path=path if resumes else None)
    return module.found


@pytest.mark.slow
@pytest.mark.parametrize("is_folder", [True, False], ids=["folder", "file"])
def test_every_sample_counts_once(nursery: Nursery, pool2: Pool, tmp_path: Path, is_folder: bool) -> None:
    arguments, path = {"save_distributed_checkpoint": is_folder}, tmp_path / "x.ckpt"
    whole = pool2.run(count, arguments, path, resumes=False, trainer=True)
    assert whole[0] == whole[1]
    for pool, sizes in ((pool2, {}), (pool2, {"tp": 2}), (Pool(nursery, 1), {})):
        for found in pool.run(count, {**arguments, **sizes}, path, resumes=True, trainer=True):
            assert found == pytest.approx(whole[0]), (pool.world_size, sizes)
