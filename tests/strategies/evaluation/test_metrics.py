"""Every logged number counts each sample once, whatever the layout, and holds no graph and no shards."""

import copy
import math
import pickle
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed import ReduceOp
from torch.distributed.tensor import DTensor
from torchmetrics import MeanMetric, MetricCollection, SumMetric

from lightning_automodel import FSDP2TPStrategy
from lightning_automodel.metrics import Perplexity, TokenAccuracy, TokenCounter
from lightning_automodel.strategies.logging import install_log
from lightning_automodel.testing.pool import Pool
from tests.support.training import GLOBAL_BATCH, Memory, Recorder, batches, make_trainer, rows, tiny_llama, whole

STEPS = 3  # odd, so that batch sizes do not divide by the number of ranks
ROWS = STEPS * GLOBAL_BATCH


class Logging(Recorder):
    """Logs in every way; the values of a rank depend on the samples that it sees, or on its share of them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = SumMetric()
        self.both = MetricCollection({"sum": SumMetric(), "mean": MeanMetric()})

    def on_validation_start(self) -> None:
        self.late = SumMetric()

    def log_all(self, batch: list[Tensor]) -> None:
        rows, share = len(batch[0]), self.share
        self.log("rows", float(rows), reduce_fx="sum", sync_dist=True)
        self.log("largest", float(share), reduce_fx="max", sync_dist=True)
        self.log("smallest", float(share + 2), reduce_fx="min", sync_dist=True)
        self.log("integer", torch.tensor(10 * (share + 1)), on_epoch=True, sync_dist=True, batch_size=share + 1)
        self.log("number", 3 * share, on_epoch=True, sync_dist=True)
        self.count(rows)
        self.log("count", self.count, on_epoch=True)
        self.late(rows)
        self.log("late", self.late, on_epoch=True)
        self.both.update(float(share))
        self.log_dict(self.both, on_epoch=True)

    @property
    def share(self) -> int:
        strategy = self.trainer.strategy
        return strategy.data_rank if isinstance(strategy, FSDP2TPStrategy) else self.global_rank

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.log("train_rows", float(len(batch[0])), reduce_fx="sum", on_step=False, on_epoch=True, sync_dist=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log_all(batch)
        self.log("graph", sum(p.square().sum() for p in self.model.lm_head.parameters()))
        for value in self.trainer.validate_loop._results.values():
            assert not isinstance(value.value, DTensor)


def numbers(strategy: Any, data_size: int) -> dict[str, float]:
    module = Logging()
    run = make_trainer(strategy, max_epochs=1)
    run.fit(module, batches(data_size, ROWS))
    trained = dict(run.callback_metrics)
    run.validate(module, batches(data_size, ROWS), verbose=False)
    found = {**trained, **run.callback_metrics}
    for name, value in found.items():
        assert type(value) is Tensor, name
        assert not value.requires_grad, name
    return {name: value.item() for name, value in found.items()}


def expected(data_size: int) -> dict[str, float]:
    shares = range(data_size)
    return {
        "train_rows": ROWS,
        "rows": ROWS,
        "largest": data_size - 1,
        "smallest": 2,
        "integer": sum(10 * (i + 1) ** 2 for i in shares) / sum(i + 1 for i in shares),
        "number": 3 * (data_size - 1) / 2,
        "count": ROWS,
        "late": ROWS,
        "sum": sum(shares) * STEPS,
        "mean": (data_size - 1) / 2,
    }


@pytest.mark.parametrize(
    ("sizes", "data_size"),
    [({"tp": 2}, 1), ({"dp_shard": 2}, 2), ({"dp_replicate": 2}, 2), ({"tp": 2, "dp_replicate": 2}, 2)],
)
def test_samples_count_once(pool2: Pool, pool4: Pool, sizes: dict[str, int], data_size: int) -> None:
    for found in (pool2 if math.prod(sizes.values()) == 2 else pool4).run(numbers, sizes, data_size, trainer=True):
        for name, value in expected(data_size).items():
            assert found[name] == pytest.approx(value), name


class Plain(Logging):
    """For Lightning's own strategy: nothing is split, which its numbers do not depend on."""

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log_all(batch)


def numbers_of_lightning(data_size: int, tp: int) -> dict[str, float]:
    run = make_trainer(ModelParallelStrategy(data_size, tp))
    return dict(run.validate(Plain(), batches(data_size, ROWS), verbose=False)[0])


def test_lightning_counts_samples_tp_times_and_inflates_means(pool2: Pool) -> None:
    by_tp = pool2.run(numbers_of_lightning, 1, 2, trainer=True)[0]
    assert (by_tp["rows"], by_tp["count"]) == (2 * ROWS, 2 * ROWS)
    by_data = pool2.run(numbers_of_lightning, 2, 1, trainer=True)[0]
    assert by_data["integer"] == pytest.approx(expected(2)["integer"] * 4.5 / 4)


# ---- metrics of language models --------------------------------------------------------------------------------------


class Judged(Recorder):
    """Judges the logits that a call with labels returns: with tp they are cut on the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.perplexity, self.accuracy, self.tokens = Perplexity(), TokenAccuracy(), TokenCounter()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        labels = torch.where(batch[0] % 5 == 0, -100, batch[0])  # not equally many on all data ranks
        logits = self.model(input_ids=batch[0], labels=labels).logits
        self.perplexity(logits, labels)
        self.accuracy.update(logits, labels)
        self.tokens.update(labels)
        self.log("perplexity", self.perplexity, on_step=True, on_epoch=True)
        self.log_dict({"accuracy": self.accuracy, "tokens": self.tokens})


def judgements(sizes: dict[str, int], data_size: int) -> dict[str, float]:
    run = make_trainer(sizes)
    return dict(run.validate(Judged(), batches(data_size, ROWS), verbose=False)[0])


def judgements_of_one_process() -> dict[str, float]:
    ids = rows(ROWS)
    labels = torch.where(ids % 5 == 0, -100, ids)
    logits, targets = tiny_llama()(ids).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    counts = targets != -100
    return {
        "perplexity_epoch": torch.nn.functional.cross_entropy(logits, targets).exp().item(),
        "accuracy": (logits.argmax(-1) == targets)[counts].float().mean().item(),
        "tokens": (labels != -100).sum().item(),
    }


@pytest.mark.parametrize(
    ("sizes", "data_size"), [({"tp": 2}, 1), ({"dp_shard": 2}, 2), ({"dp_replicate": 2, "tp": 2}, 2)]
)
def test_metrics_of_logits_that_are_cut(pool2: Pool, pool4: Pool, sizes: dict[str, int], data_size: int) -> None:
    wanted = judgements_of_one_process()
    for found in (pool4 if len(sizes) == 2 else pool2).run(judgements, sizes, data_size, trainer=True):
        assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-5)


# ---- what the strategy offers ----------------------------------------------------------------------------------------


class Asking(Recorder):
    def on_train_start(self) -> None:
        strategy = self.trainer.strategy
        rank, data = torch.tensor(strategy.global_rank), strategy.data_size
        ranks = list(range(strategy.world_size))
        own = [r for r in ranks if r % strategy.tp_group.size() == strategy.global_rank % strategy.tp_group.size()]
        self.answers = {
            "mean of integers": (strategy.reduce(rank).item(), sum(own) / data),
            "sum": (strategy.reduce(rank, reduce_op=ReduceOp.SUM).item(), sum(own)),
            "argument": (rank.item(), strategy.global_rank),
            "group": (strategy.reduce(rank, strategy.tp_group, "max").item(), strategy.global_rank | 1),
            "number": (strategy.reduce(1.5), 1.5),
            "gathered": (self.all_gather(rank).tolist(), own),
            "all": (strategy.reduce_boolean_decision(strategy.global_rank != 1), False),
            "all of all": (strategy.reduce_boolean_decision(True), True),
            "any": (strategy.reduce_boolean_decision(strategy.global_rank == 1, all=False), True),
            "none": (strategy.reduce_boolean_decision(False, all=False), False),
        }


def answers() -> dict[str, tuple[Any, Any]]:
    module = Asking()
    make_trainer({"tp": 2}, max_steps=1).fit(module, batches(2))
    return module.answers


def test_reductions(pool4: Pool) -> None:
    for found in pool4.run(answers, trainer=True):
        for name, (actual, wanted) in found.items():
            assert actual == wanted, name


class Penalty(Recorder):
    """A loss that is made of parameters outside of any forward pass, and so is a DTensor."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = sum(p.square().sum() for p in self.model.parameters())
        assert isinstance(loss, DTensor)
        self.log("penalty", loss, prog_bar=True)
        return {"loss": loss, "shards": loss}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())
        assert not any(isinstance(value, DTensor) for value in outputs.values())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.error = max(float((whole(p.grad) - 2 * whole(p)).abs().max()) for p in self.parameters())


def penalize() -> tuple[float, list[float], float, float]:
    module = Penalty()
    run = make_trainer({"tp": 2}, max_steps=1)
    run.fit(module, batches(2))
    first = Recorder()
    first.configure_model()
    penalty = sum(float(p.detach().square().sum()) for p in first.parameters())
    return module.error, module.losses, run.callback_metrics["penalty"].item(), penalty


@pytest.mark.slow
def test_a_loss_that_is_a_dtensor(pool4: Pool) -> None:
    error, losses, logged, penalty = pool4.run(penalize, trainer=True)[0]
    assert error < 1e-6
    assert losses == pytest.approx([penalty])
    assert logged == pytest.approx(penalty)


# ---- throughput ------------------------------------------------------------------------------------------------------


def throughput(strategy: Any, data_size: int) -> float | None:
    """Samples per second of all devices over those of one."""
    monitor, memory = ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=2), Memory()
    run = make_trainer(strategy, max_epochs=1, callbacks=[monitor], logger=memory, log_every_n_steps=1)
    run.fit(Recorder(), batches(data_size, ROWS))
    last = next((entry for entry in memory.logged[::-1] if "train/device/samples_per_sec" in entry), None)
    return None if last is None else last.get("train/samples_per_sec", 0) / last["train/device/samples_per_sec"]


@pytest.mark.slow
def test_throughput_counts_data_ranks(pool2: Pool, pool4: Pool) -> None:
    assert pool4.run(throughput, {"tp": 2}, 2, trainer=True)[0] == pytest.approx(2)
    assert pool2.run(throughput, {"tp": 2}, 1, trainer=True)[0] == 0  # one data rank: no other number than its own
    assert pool2.run(throughput, ModelParallelStrategy(1, 2), 1, trainer=True)[0] == pytest.approx(2)


# ---- copies ----------------------------------------------------------------------------------------------------------


def test_log_belongs_to_its_module() -> None:
    module = L.LightningModule()
    install_log(module)
    assert copy.deepcopy(module).log.__self__ is not module  # type: ignore[attr-defined]
    restored = pickle.loads(pickle.dumps(module))
    assert restored.log.__self__ is restored
