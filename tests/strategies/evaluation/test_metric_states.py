"""Metrics of torchmetrics whose states are lists, on data ranks with unlike numbers of samples, and with none: the
numbers of one process.
"""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import CatMetric, MetricCollection, SpearmanCorrCoef
from torchmetrics.classification import MulticlassAUROC
from torchmetrics.retrieval import RetrievalMRR
from torchmetrics.text import ROUGEScore

from lightning_automodel import DDPStrategy
from lightning_automodel.distributed.unlike_tensors import gather_unlike
from lightning_automodel.testing.pool import Nursery, Pool
from tests.support.training import Recorder, make_trainer, rows, world_size

KINDS = 3


class Judged(Recorder):
    """Judges drawn numbers, of which each sample has its own."""

    def __init__(self) -> None:
        super().__init__()
        self.rouge = MetricCollection({"rouge": ROUGEScore(rouge_keys="rouge1")})  # a list of numbers for each score
        self.ranking = RetrievalMRR()  # lists of rows
        self.curve = MulticlassAUROC(num_classes=KINDS)  # lists of matrices and of integers, each joined first
        self.order = SpearmanCorrCoef()
        self.losses = CatMetric()  # of numbers

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        ids = batch[0]
        scores = torch.sin(ids.float())  # [rows, length]
        self.rouge.update([" ".join(map(str, row)) for row in (ids % 7).tolist()], ["1 2 3 4"] * len(ids))
        self.ranking.update(scores.flatten(), (ids % 2).flatten(), indexes=ids[:, :1].expand_as(ids).flatten())
        self.curve.update(scores[:, :KINDS].softmax(-1), ids[:, 0] % KINDS)
        self.order.update(scores[:, 0], scores[:, 1])
        self.losses.update(scores.mean())

    def on_validation_epoch_end(self) -> None:
        copied = pickle.loads(pickle.dumps(copy.deepcopy(self.rouge)))
        assert world_size() == 1 or vars(copied["rouge"])["_sync_dist"].__self__ is copied["rouge"]
        self.log_dict(self.rouge.compute())
        self.log("curve", self.curve.compute())
        self.log("order", self.order.compute())
        self.log("ranking", self.ranking.compute())
        self.log("losses", self.losses.compute().sum())


def judge(count: int) -> dict[str, float]:
    """Runs on each rank."""
    run = make_trainer(DDPStrategy() if world_size() > 1 else "auto")
    (found,) = run.validate(Judged(), DataLoader(TensorDataset(rows(count))), verbose=False)
    return dict(found)


@pytest.mark.parametrize("count", [1, 3])
def test_lists_of_unlike_lengths_are_those_of_one_process(count: int, nursery: Nursery, pool2: Pool) -> None:
    (one,) = Pool(nursery, 1).run(judge, count, trainer=True)
    assert len(one) == 7
    for found in pool2.run(judge, count, trainer=True, timeout=30):
        assert found == pytest.approx(one, rel=1e-5, nan_ok=True)


VALUES: list[Any] = [
    [torch.tensor([[1.5, 2.0]]), None],
    [torch.tensor([1, 2, 3]).expand(2, 3).T, torch.tensor(True)],
    [torch.zeros(0, 4), torch.tensor([1 + 2j])],
    [torch.tensor([1, 2], dtype=torch.bfloat16), torch.arange(6.0)[::5][:1]],
    [None, None],
]


def gather_all(values: list[Any]) -> list[list[Tensor | None]]:
    """Runs on each rank."""
    group = torch.distributed.group.WORLD
    assert group is not None
    return [gather_unlike(pair[group.rank()], group, torch.device("cpu")) for pair in values]


def test_tensors_of_any_kind_are_gathered(pool2: Pool) -> None:
    for found in pool2.run(gather_all, VALUES):
        for many, one in zip(found, VALUES, strict=True):
            for value, expected in zip(many, one, strict=True):
                assert (value is None) == (expected is None)
                if value is not None:
                    assert value.dtype == expected.dtype
                    assert value.equal(expected)
