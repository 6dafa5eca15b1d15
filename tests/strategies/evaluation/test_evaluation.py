"""Evaluation on data ranks with different numbers of batches: the numbers of one process, no hang, no trace."""

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.utils.data import DataLoader
from torchmetrics import CatMetric, MeanMetric

from lightning_automodel.strategies.evaluation.fillers import fresh_containers, preserved_attributes
from lightning_automodel.testing.pool import Nursery, Pool, PoolTimeout
from tests.strategies.modules import StockModule, Stream, TinyModule, loader, trainer
from tests.support.marks import with_long
from tests.support.training import Memory

FILLINGS: list[bool] = []  # not an attribute of the module, which a filler restores


class Evaluated(TinyModule):
    """Logs in every way, and keeps results as Lightning's documentation shows."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[float] = []
        self.fillings = 0
        self.inference_modes: set[bool] = set()
        self.metrics = nn.ModuleList([MeanMetric() for _ in range(3)])
        self.losses = CatMetric()
        self.register_buffer("steps", torch.zeros(()))

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = self.loss(batch)
        FILLINGS.append(self.trainer.strategy.is_filling)
        self.inference_modes.add(torch.is_inference_mode_enabled())
        rows = len(batch.pop())  # takes its batch apart
        self.outputs.append(loss.item())
        self.steps += 1
        metric = self.metrics[dataloader_idx]
        metric(loss, weight=rows)
        self.losses.update(loss.reshape(1))
        both: dict[str, Any] = {"sync_dist": True, "batch_size": rows}
        self.log("metric", metric)
        self.log("mean", loss, **both)
        self.log("forked", loss, on_step=True, on_epoch=True, **both)
        self.log("sum", torch.tensor(float(rows)), reduce_fx="sum", **both)
        self.log("max", loss, reduce_fx="max", **both)

    def on_validation_epoch_end(self) -> None:
        self.log("cat", self.losses.compute().sum())
        self.losses.reset()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)  # any number of ranks trains the same model

    test_step = validation_step

    def on_test_epoch_end(self) -> None:
        self.on_validation_epoch_end()

    def predict_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> list[int]:
        self.loss(batch)
        FILLINGS.append(self.trainer.strategy.is_filling)
        return batch[0][:, 0].tolist()


Result = dict[str, Any]


def evaluate(devices: int, tp: int, counts: list[int], stream: bool, **kwargs: Any) -> Result:
    """Validates, fits with validation, tests and predicts with one module."""
    loaders: list[Any] = [DataLoader(Stream(n)) if stream else loader(n) for n in counts]
    module = Evaluated()
    run = trainer(devices, {"tp": tp, "process_group_backend": "cpu:gloo"}, num_sanity_val_steps=2, **kwargs)
    validated = run.validate(module, loaders, verbose=False)
    steps = int(module.steps), len(module.outputs)
    run.fit(module, loader(4), loaders)
    tested = run.test(module, loaders, verbose=False)
    predicted = run.predict(module, loaders)
    assert predicted is not None
    return {
        "validated": validated,
        "fitted": {key: float(value) for key, value in run.callback_metrics.items()},
        "tested": tested,
        "predicted": predicted if len(counts) > 1 else [predicted],
        "steps": steps,
        "inference": module.inference_modes,
        "fillers": sum(FILLINGS),
    }


def close(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return len(one) == len(other) and all(map(close, one, other))
    return one.keys() == other.keys() and all(one[key] == pytest.approx(other[key], rel=1e-5) for key in one)


def check(ranks: list[Result], one: Result) -> None:
    for result in ranks:
        for stage in ("validated", "fitted", "tested"):
            assert close(result[stage], one[stage]), (stage, result[stage], one[stage])
        batches = sum(map(len, result["predicted"]))
        assert result["steps"] == (batches, batches)
        assert not any(result["inference"])
    for each, whole in zip(zip(*(r["predicted"] for r in ranks), strict=True), one["predicted"], strict=True):
        assert sorted(row for rank in each for row in rank) == whole


CASES = {
    "odd": ([5], False),
    "fewer-than-ranks": ([1], False),
    "several": ([3, 1, 5], False),
    "streams": ([5, 1, 2], True),
    "first-empty": ([1, 3, 1], True),
}


@pytest.mark.parametrize("case", with_long(CASES, "odd", "several"))
def test_uneven_evaluation_equals_one_process(case: str, nursery: Nursery, pool2: Pool) -> None:
    counts, stream = CASES[case]
    (one,) = Pool(nursery, 1).run(evaluate, 1, 1, counts, stream, trainer=True, timeout=20)
    ranks = pool2.run(evaluate, 2, 1, counts, stream, trainer=True, timeout=20)
    check(ranks, one)
    assert one["fillers"] == 0
    assert ranks[0]["fillers"] + ranks[1]["fillers"] > 0


@pytest.mark.slow
def test_limits_and_tensor_parallel_groups(nursery: Nursery, pool4: Pool) -> None:
    limits: dict[str, Any] = {f"limit_{stage}_batches": 2 for stage in ("val", "test", "predict")}
    (one,) = Pool(nursery, 1).run(evaluate, 1, 1, [3], False, trainer=True)
    ranks = pool4.run(evaluate, 4, 2, [3], False, trainer=True, **limits)
    check(ranks[::2], one)
    check(ranks[1::2], one)


@pytest.mark.slow
@pytest.mark.parametrize(("share", "rows"), [(0.45, 4), (0.24, 2)])
def test_shares_of_unlike_numbers_of_batches(share: float, rows: int, nursery: Nursery, pool2: Pool) -> None:
    """Of nine rows a rank has five and the other four: int(0.45 * 4) is a batch less, and int(0.24 * 4) none."""
    stages = ("val", "test", "predict")
    of_one, of_two = ({f"limit_{stage}_batches": limit for stage in stages} for limit in (rows, share))
    (one,) = Pool(nursery, 1).run(evaluate, 1, 1, [9], False, trainer=True, **of_one)
    check(pool2.run(evaluate, 2, 1, [9], False, trainer=True, **of_two), one)


class OfBoth(TinyModule):
    """Runs the model once per step."""

    def validation_step(self, batch: list[Any], batch_idx: int, dataloader_idx: int = 0) -> None:
        batch = [batch] if isinstance(batch[0], Tensor) else batch  # one loader after the other
        self.loss([torch.cat([each[0] for each in batch if each is not None])])


def warnings_of(mode: Any, counts: list[int]) -> list[str]:
    """Evaluate over loaders of ``counts`` rows, combined; what is told of unlike shares."""
    combined = CombinedLoader([loader(count) for count in counts], mode)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(2).validate(OfBoth(), combined, verbose=False)
    return [text for each in caught if "CombinedLoader(mode" in (text := str(each.message))]


@pytest.mark.slow
def test_combined_loaders_of_unlike_shares_are_told_of(pool2: Pool) -> None:
    """Of three rows a rank has two and the other one, which decides there how far the other loader is read."""

    def told(mode: str, counts: list[int]) -> list[str]:
        return pool2.run(warnings_of, mode, counts, trainer=True)[0]

    assert [("left out" in text, "data rank 1: [4, 1]" in text) for text in told("min_size", [8, 3])] == [(True, True)]
    assert ["count twice" in text for text in told("max_size_cycle", [8, 3])] == [True]
    assert ["waits forever" in text for text in told("max_size", [8, 3])] == [True]
    assert told("min_size", [8, 4]) == told("sequential", [8, 3]) == []


class OfSteps(TinyModule):
    """Combines the numbers of the rows of each step over the data ranks, and logs their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, list[float]] = {}

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.loss(batch)
        row, strategy = batch[0][0, 0], self.trainer.strategy
        for operation in ("mean", "sum", "min", "max"):
            self.found.setdefault(operation, []).append(strategy.reduce(row.float(), reduce_op=operation).item())
        for operation in ("mean", "min", "max", ReduceOp.PRODUCT):
            self.found.setdefault(f"whole {operation}", []).append(strategy.reduce(row, reduce_op=operation).item())
        self.log("row", row.float(), on_step=True, on_epoch=True, sync_dist=True)


def steps_of(count: int) -> tuple[dict[str, list[float]], list[float]]:
    module, memory = OfSteps(), Memory()
    trainer(2, {"process_group_backend": "cpu:gloo"}, logger=memory).validate(module, loader(count), verbose=False)
    return module.found, [entry["row_step"] for entry in memory.logged if "row_step" in entry]


def test_fillers_do_not_count_in_a_step(pool2: Pool) -> None:
    (found, logged), _ = pool2.run(steps_of, 5, trainer=True)
    mean, least, most = [0.5, 2.5, 4.0], [0, 2, 4], [1, 3, 4]
    assert logged == mean
    assert found == {
        **{"mean": mean, "sum": [1, 5, 4], "min": least, "max": most},
        **{"whole mean": mean, "whole min": least, "whole max": most, f"whole {ReduceOp.PRODUCT}": [0, 6, 4]},
    }


# ---- what Lightning's strategy does ----------------------------------------------------------------------------------


def stock_predict(count: int) -> None:
    trainer(2, stock=True).predict(StockModule(), loader(count))


def stock_validation() -> dict[str, Any]:
    class Module(StockModule):
        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            self.inference = torch.is_inference_mode_enabled()

    module = Module()
    run = trainer(2, {"process_group_backend": "cpu:gloo"}, stock=True)
    run.validate(module, loader(3), verbose=False)
    return {"rows": module.seen["validate"], "inference": module.inference}


@pytest.mark.long
def test_lightning_hangs_where_one_rank_predicts_more(pool2: Pool) -> None:
    with pytest.raises(PoolTimeout):
        pool2.run(stock_predict, 3, trainer=True, timeout=5)


def test_lightning_validates_in_inference_mode_and_twice(pool2: Pool) -> None:
    first, second = pool2.run(stock_validation, trainer=True)
    assert first["inference"]
    assert sorted(first["rows"] + second["rows"]) == [0, 0, 1, 2]


# ---- without processes -----------------------------------------------------------------------------------------------


def test_a_filler_leaves_no_trace() -> None:
    module = Evaluated()
    module.nested = {0: [1], 1: [2]}
    module.total = torch.ones(2)
    metric = module.metrics[0]
    metric.update(torch.tensor(2.0))
    with preserved_attributes(module):
        module.outputs.append(1.0)
        module.nested[0].append(3)
        module.nested[2] = []
        module.total += 1
        module.steps += 1
        module.new = 1
        module.fillings = 7
        metric.update(torch.tensor(8.0))
        module.losses.update(torch.tensor(1.0))
    assert (module.outputs, module.nested, module.fillings) == ([], {0: [1], 1: [2]}, 0)
    assert (module.total.tolist(), module.steps.item()) == ([1, 1], 0)
    assert not hasattr(module, "new")
    assert (metric.compute(), metric.update_count, module.losses.value) == (2, 1, [])


def test_containers_of_a_batch_are_fresh() -> None:
    batch = {"x": [torch.ones(1)], "y": "text"}
    fresh = fresh_containers(batch)
    del fresh["y"]
    fresh["x"].pop()
    assert batch == {"x": [torch.ones(1)], "y": "text"}
