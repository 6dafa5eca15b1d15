"""Batch samplers of users: batches of those that are made of something else than a sampler are dealt to data ranks."""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, Sampler, SequentialSampler, TensorDataset

from lightning_automodel.testing.pool import Nursery, Pool
from tests.strategies.modules import TinyModule, rows, trainer
from tests.support.training import SaveAfter

ROWS = 12


class Epochs:
    """Is told epochs."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class ByLength(BatchSampler):
    """Made of the lengths of samples: the longest first, from another one on in each epoch that its sampler is told."""

    def __init__(self, lengths: list[int], batch_size: int, drop_last: bool = False) -> None:
        self.lengths, self.batch_size, self.drop_last = list(lengths), batch_size, drop_last
        self.sampler: Any = Epochs()

    def set_epoch(self, epoch: int) -> None:
        raise AssertionError("Lightning does not tell it on one device")

    def __len__(self) -> int:
        return -(-len(self.lengths) // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        order = sorted(range(len(self.lengths)), key=lambda i: self.lengths[i], reverse=True)
        order = [order[(i + self.sampler.epoch) % len(order)] for i in range(len(order))]
        return (order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size))


class Unlike:
    """Batches of several sizes, five of them, and of no class of torch's."""

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10]])


class AroundSampler(BatchSampler):
    """Takes what ``BatchSampler`` takes; batches come last row first."""

    def __iter__(self) -> Iterator[list[int]]:
        return (batch[::-1] for batch in super().__iter__())


class AroundSamplerOfLengths(AroundSampler):
    """Needs more than ``BatchSampler``."""

    def __init__(self, sampler: Any, batch_size: int, drop_last: bool, lengths: list[int]) -> None:
        super().__init__(sampler, batch_size, drop_last)
        self.lengths = lengths

    def __iter__(self) -> Iterator[list[int]]:
        return (sorted(batch, key=self.lengths.__getitem__) for batch in super().__iter__())


KINDS: dict[str, Callable[[int], Any]] = {
    "by length": lambda size: ByLength([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], 2),
    "unlike": lambda size: Unlike(),
    "of lengths": lambda size: AroundSamplerOfLengths(SequentialSampler(range(ROWS)), 2, False, [*range(ROWS)][::-1]),
    "around a sampler": lambda size: AroundSampler(SequentialSampler(range(ROWS)), 4 // size, False),
}
DEALT = ("by length", "unlike")


class Batched(TinyModule):
    """Keeps the batches of each stage, from a loader that it makes by itself."""

    def __init__(self, kind: str, size: int) -> None:
        super().__init__()
        self.kind, self.size = kind, size
        self.batches: dict[str, list[list[int]]] = {}

    def train_dataloader(self) -> DataLoader:
        return self.make_loader()

    def val_dataloader(self) -> DataLoader:
        return self.make_loader()

    def predict_dataloader(self) -> DataLoader:
        return self.make_loader()

    def make_loader(self) -> DataLoader:
        return DataLoader(TensorDataset(rows(ROWS)), batch_sampler=KINDS[self.kind](self.size))

    def loss(self, batch: list[Tensor]) -> Tensor:
        self.batches.setdefault(self.trainer.state.stage.value, []).append(batch[0][:, 0].tolist())  # type: ignore[union-attr]
        return super().loss(batch)


class Indices(BasePredictionWriter):
    """Keeps the indices that a writer of predictions is told."""

    def __init__(self) -> None:
        super().__init__("batch")
        self.found: list[list[int]] = []

    def write_on_batch_end(self, trainer: Any, pl_module: Any, prediction: Any, indices: Any, *args: Any) -> None:
        assert prediction == list(indices)
        self.found.append(list(indices))


def run(sizes: dict[str, int] | None, size: int, is_passed: bool) -> dict[str, dict[str, list[list[int]]]]:
    """Runs on each rank: the batches of two epochs, a validation and a prediction; without sizes on one device."""
    found = {}
    for kind in KINDS:
        module, indices = Batched(kind, size), Indices()
        given = [module.make_loader()] if is_passed else []  # made where Lightning does not see its arguments
        strategy = SingleDeviceStrategy("cpu") if sizes is None else dict(sizes)
        one = trainer(1 if sizes is None else 2, strategy, max_epochs=2, callbacks=[indices], limit_val_batches=0)
        one.fit(module, *given)
        one.limit_val_batches = 1.0
        one.validate(module, *given, verbose=False)
        if sizes is not None:  # one device: Lightning puts a sampler in the place of lengths, or refuses to predict
            one.predict(module, *given)
        found[kind] = {**module.batches, "indices": indices.found}
    return found


def in_turn(ranks: list[list[list[int]]]) -> list[list[int]]:
    longest = max(map(len, ranks))
    return [rank[i] for i in range(longest) for rank in ranks if i < len(rank)]


@pytest.mark.slow
@pytest.mark.parametrize("is_passed", [False, True], ids=["hook", "passed"])
def test_batches_are_those_of_one_device(is_passed: bool, nursery: Nursery, pool2: Pool) -> None:
    one = Pool(nursery, 1).run(run, None, 1, is_passed, trainer=True)[0]
    ranks = pool2.run(run, {"dp_shard": 2}, 2, is_passed, trainer=True)
    for kind in (*DEALT, *(["of lengths"] if is_passed else [])):  # in a hook, Lightning sees what it was made of
        expected = {"validate": one[kind]["validate"]}
        count = len(expected["validate"])
        predicted = one[kind]["validate" if is_passed else "train"][:count]  # a new loader is told no epoch
        expected |= {"predict": predicted, "indices": predicted}
        for stage, batches in expected.items():
            assert in_turn([rank[kind][stage] for rank in ranks]) == batches, (kind, stage)
    epochs = [one["unlike"]["train"][:4], one["unlike"]["train"][5:9]]  # a fifth batch is one rank's only
    assert in_turn([rank["unlike"]["train"] for rank in ranks]) == [*epochs[0], *epochs[1]]
    assert in_turn([rank["by length"]["train"] for rank in ranks]) == one["by length"]["train"]
    assert one["by length"]["train"][0] != one["by length"]["train"][6]
    if not is_passed:
        assert ranks[0]["of lengths"]["train"][:2] == [[2, 0], [6, 4]]
    rebuilt = in_turn([rank["around a sampler"]["train"] for rank in ranks])
    assert rebuilt[:2] == [[2, 0], [3, 1]]


@pytest.mark.slow
def test_a_tensor_parallel_group_has_all_batches(nursery: Nursery, pool2: Pool) -> None:
    one = Pool(nursery, 1).run(run, None, 1, True, trainer=True)[0]
    for rank in pool2.run(run, {"tp": 2}, 1, True, trainer=True):
        for kind in KINDS:
            assert rank[kind]["train"] == one[kind]["train"], kind
            assert rank[kind]["validate"] == rank[kind]["predict"] == one[kind]["validate"], kind


def resumed(path: Path) -> list[list[list[int]]]:
    """Runs on each rank: batches of a whole run, and of one that goes on in the second epoch."""
    found = []
    for resume in (None, path):
        module = Batched("by length", 2)
        callbacks: Any = [] if resume else [SaveAfter(path, 4)]
        trainer(2, {"dp_shard": 2}, max_epochs=2, callbacks=callbacks, limit_val_batches=0).fit(
            module, ckpt_path=resume
        )
        found.append(module.batches["train"])
    return found


def test_a_run_goes_on_behind_the_batches_seen(pool2: Pool, tmp_path: Path) -> None:
    for whole, again in pool2.run(resumed, tmp_path / "mid.ckpt", trainer=True):
        assert len(whole) == 6
        assert again == whole[-len(again) :]
        assert len(again) == 2


def part(layout: dict[str, int], save: Path, count: int | None, resume: Path | None) -> list[list[int]]:
    """Runs on each rank: batches of an epoch, saved when ``count`` steps of all runs so far are through."""
    module = Batched("by length", 2)
    callbacks: Any = [] if count is None else [SaveAfter(save, count)]
    trainer(2, layout, callbacks=callbacks, limit_val_batches=0).fit(module, ckpt_path=resume)
    return module.batches["train"]


def test_another_layout_goes_on_behind_the_batches_seen(pool2: Pool, tmp_path: Path) -> None:
    """A step of two batches on two data ranks, one of the third on one, and the rest on two."""
    first, second = tmp_path / "first.ckpt", tmp_path / "second.ckpt"
    whole = in_turn(pool2.run(part, {"dp_shard": 2}, first, 1, None, trainer=True))
    for seen in pool2.run(part, {"tp": 2}, second, 2, first, trainer=True):
        assert seen == whole[2:]
    assert in_turn(pool2.run(part, {"dp_shard": 2}, first, None, second, trainer=True)) == whole[3:5]


class OfSize(Unlike):
    """Batches of a size that it does not tell."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return ROWS // self.rows

    def __iter__(self) -> Iterator[list[int]]:
        return (list(range(i, i + self.rows)) for i in range(0, ROWS, self.rows))


def warnings_of_sizes(path: Path) -> list[str]:
    """What is said when a run goes on with batches of another size."""
    said: list[str] = []
    for size, resume in ((2, None), (4, path)):
        data = DataLoader(TensorDataset(rows(ROWS)), batch_sampler=OfSize(size))
        callbacks: Any = [] if resume else [SaveAfter(path, 1)]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer(1, {}, callbacks=callbacks, limit_val_batches=0).fit(TinyModule(), data, ckpt_path=resume)
        said += [text for each in caught if "training data of the checkpoint" in (text := str(each.message))]
    return said


def test_batches_of_another_size_are_told_of(nursery: Nursery, tmp_path: Path) -> None:
    [said] = Pool(nursery, 1).run(warnings_of_sizes, tmp_path / "x.ckpt", trainer=True)
    assert len(said) == 1
    assert "as 6 batches of a sampler of your own on 1 data ranks" in said[0]
    assert "now as 3 batches of" in said[0]


class Divided(Batched):
    """Its loaders are divided by the user, in batches of two, or in plain batches of a batch sampler of torch's."""

    def make_loader(self) -> DataLoader:
        strategy: Any = self.trainer.strategy
        settings = {
            "by data rank": {"num_replicas": strategy.data_size, "rank": strategy.data_rank},
            "into four": {"num_replicas": 4, "rank": strategy.data_rank},
            "not": {},
        }[self.kind]
        dataset: Any = TensorDataset(rows(9))
        order = DistributedSampler(dataset, **settings, shuffle=False) if settings else SequentialSampler(dataset)
        return DataLoader(dataset, batch_sampler=BatchSampler(order, 2, drop_last=False))


def run_divided(kind: str) -> tuple[dict[str, list[list[int]]], list[str]]:
    """Runs on each rank: the batches of an epoch, a validation and a prediction, and what is said of samplers."""
    module = Divided(kind, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = trainer(2, {"dp_shard": 2}, limit_val_batches=0)
        run.fit(module)
        run.limit_val_batches = 1.0
        run.validate(module, verbose=False)
        run.predict(module)
    said = [text for each in caught if "DistributedSampler of a loader" in (text := str(each.message))]
    return module.batches, said


@pytest.mark.parametrize(
    ("kind", "expected", "said"),
    [
        ("not", [[0, 2], [4, 6]], []),
        ("by data rank", [[0, 2], [4, 6], [8]], ["repeats 1 of its samples"]),
        ("into four", [[0, 4], [8]], ["among 2 data ranks (num_replicas=4, rank=0; num_replicas=4, rank=1)"]),
    ],
)
def test_what_a_user_divides_is_not_divided_again(
    kind: str, expected: list[list[int]], said: list[str], pool2: Pool
) -> None:
    """In a hook, where Lightning's own strategies make batches of one row of it."""
    [(first, told), (_, second)] = pool2.run(run_divided, kind, trainer=True)
    assert first["train"] == expected
    assert first["validate"] == first["predict"] == (expected if said else [*expected, [8]])
    assert [part in text for part, text in zip(said, told, strict=True)] == [True] * len(said)
    assert second == []


class ByRank(Sampler):
    """An order that is another one on each rank, of rows or of batches."""

    def __init__(self, is_batched: bool) -> None:
        self.is_batched = is_batched

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Iterator[Any]:
        order = [*range(dist.get_rank(), ROWS), *range(dist.get_rank())]
        return iter([[i] for i in order] if self.is_batched else order)


def errors_of_orders(is_batched: bool) -> list[str]:
    """What each stage says of that order."""
    errors = []
    for stage in ("fit", "validate", "predict"):
        name = "batch_sampler" if is_batched else "sampler"
        data = DataLoader(TensorDataset(rows(ROWS)), **{name: ByRank(is_batched)})  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="read different orders") as raised:
            getattr(trainer(2, {"dp_shard": 2}, limit_val_batches=int(stage == "validate")), stage)(TinyModule(), data)
        errors.append(str(raised.value))
    return errors


@pytest.mark.parametrize("is_batched", [False, True], ids=["samples", "batches"])
def test_orders_that_are_not_one_are_an_error(is_batched: bool, pool2: Pool) -> None:
    for errors in pool2.run(errors_of_orders, is_batched, trainer=True):
        for error, stage in zip(errors, ("train", "validate", "predict"), strict=True):
            assert f"rank 0 and rank 1 read different orders (sample 0 of {stage})" in error
            assert "use_distributed_sampler=False" in error
