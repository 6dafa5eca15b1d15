"""Streams that data ranks share: each sample comes once, and ranks whose streams are not one are told."""

import os
import warnings
from collections.abc import Callable
from typing import Any

import datasets
import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data.datapipes.iter import IterableWrapper

from lightning_automodel.testing.pool import Pool
from tests.strategies.modules import Stream, TinyModule, rows, trainer


class Shuffling(Stream):
    """Draws its order where it is read."""

    def __iter__(self) -> Any:
        return ((rows(self.count)[i],) for i in torch.randperm(self.count).tolist())


class ByRank(Stream):
    """Takes its own part, as streams for data parallelism do."""

    def __iter__(self) -> Any:
        return ((row,) for row in rows(self.count)[dist.get_rank() :: dist.get_world_size()])


class ByEnvironment(Stream):
    """The same in worker processes, which know no groups."""

    def __iter__(self) -> Any:
        return ((row,) for row in rows(self.count)[int(os.environ["RANK"]) :: int(os.environ["WORLD_SIZE"])])


class Unseeded(Stream):
    """Shuffles by a generator of its own, from ``first`` on."""

    def __init__(self, count: int, first: int = 0) -> None:
        super().__init__(count)
        self.first = first

    def __iter__(self) -> Any:
        late = np.random.default_rng().permutation(range(self.first, self.count))
        return ((rows(self.count)[i],) for i in [*range(self.first), *late.tolist()])


class Augmented(Stream):
    """Rows in one order, each with something of its own added."""

    def __init__(self, count: int, declares: bool) -> None:
        super().__init__(count)
        if declares:
            self.sharded_by_data_rank = False

    def __iter__(self) -> Any:
        own = np.random.default_rng()
        return ((torch.cat([row, torch.tensor(own.integers(61, size=9))]),) for row in rows(self.count))


class Workers(Stream):
    """Divides its rows among its workers, in another order in each pass."""

    passes = 0

    def __iter__(self) -> Any:
        worker = get_worker_info()
        order = torch.randperm(self.count, generator=torch.Generator().manual_seed(self.passes)).tolist()
        self.passes += 1
        part = order if worker is None else order[worker.id :: worker.num_workers]
        return ((rows(self.count)[i],) for i in part)


class Kept(Stream):
    """Goes on where the last pass was left."""

    rest: Any = None

    def __iter__(self) -> Any:
        self.rest = self.rest or super().__iter__()
        return self.rest


class OnFirstRank(Stream):
    """One file, which is the first rank's."""

    def __iter__(self) -> Any:
        return super().__iter__() if os.environ["RANK"] == "0" else iter(())


def hugging_face(seed: int | None) -> Any:
    """A stream of datasets that shuffles in a buffer."""

    def numbers(count: int) -> Any:
        yield from ({"number": number} for number in range(count))

    stream = datasets.IterableDataset.from_generator(numbers, gen_kwargs={"count": 24})
    return stream.shuffle(seed=seed, buffer_size=12)


def collate(samples: list[Any]) -> list[torch.Tensor]:
    """Batches of both kinds of samples."""
    return [torch.stack([rows(24)[s["number"]] if isinstance(s, dict) else s[0] for s in samples])]


def pipe() -> Any:
    """A datapipe that shuffles, and divides itself where it is told to."""
    return IterableWrapper(range(24)).shuffle().sharding_filter().map(lambda number: {"number": number})


MAKE: dict[str, Callable[[], Any]] = {
    "by rank": lambda: ByRank(24),
    "by environment": lambda: ByEnvironment(24),
    "unseeded": lambda: Unseeded(24),
    "late": lambda: Unseeded(40, first=9),
    "hf unseeded": lambda: hugging_face(None),
    "hf": lambda: hugging_face(5),
    "augmented": lambda: Augmented(24, declares=False),
    "declared": lambda: Augmented(24, declares=True),
    "workers": lambda: Workers(24),
    "shuffling": lambda: Shuffling(24),
    "pipe": pipe,
    "kept": lambda: Kept(24),
    "on first rank": lambda: OnFirstRank(24),
}


def fit(kind: str, workers: int, sizes: dict[str, int], **options: Any) -> list[int] | str:
    """The rows that this rank trained on, of a run whose workers are seeded; or the error."""
    seeds = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")
    with pytest.MonkeyPatch.context() as patch:
        for name in seeds:
            patch.setenv(name, "")  # put back afterwards
        L.seed_everything(3, workers=True, verbose=False)
        module = TinyModule()
        data = DataLoader(MAKE[kind](), batch_size=2, num_workers=workers, collate_fn=collate)
        try:
            trainer(int(os.environ["WORLD_SIZE"]), sizes, **options).fit(module, data)
        except ValueError as error:
            return str(error)
    return module.seen["train"]


class Seeding(TinyModule):
    """Seeds its own draws by data rank, as docs/exactness.md has it."""

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        torch.manual_seed(1000 * self.global_step + self.trainer.strategy.data_rank)  # type: ignore[attr-defined]
        return super().training_step(batch, batch_idx)


def warnings_of(kind: str, workers: int) -> list[str]:
    """What is told of streams in three passes whose steps seed by data rank."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data = DataLoader(MAKE[kind](), batch_size=2, num_workers=workers, collate_fn=collate)
        trainer(int(os.environ["WORLD_SIZE"]), max_epochs=3).fit(Seeding(), data)
    return [text for each in caught if "read different streams" in (text := str(each.message))]


def evaluate(kind: str) -> list[int] | str:
    """The same of a validation behind a loader of which one rank has nothing."""
    module = TinyModule()
    loaders = [DataLoader(Stream(1), collate_fn=collate), DataLoader(MAKE[kind](), collate_fn=collate)]
    module.validation_step = lambda batch, batch_idx, dataloader_idx: module.loss(batch)  # type: ignore[assignment]
    try:
        trainer(int(os.environ["WORLD_SIZE"])).validate(module, loaders, verbose=False)
    except ValueError as error:
        return str(error)
    return module.seen["validate"]


@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        ("hf", 0),
        ("hf", 2),
        ("workers", 2),
        ("declared", 0),
        ("declared", 1),
        ("shuffling", 0),
        ("shuffling", 1),
        ("pipe", 2),
    ],
)
def test_each_sample_of_one_stream_comes_once(kind: str, workers: int, pool2: Pool) -> None:
    shares = pool2.run(fit, kind, workers, {}, trainer=True)
    assert sorted(shares[0] + shares[1]) == list(range(24))


@pytest.mark.parametrize("limits", [{}, {"limit_train_batches": 3}])
def test_passes_in_other_orders_are_not_compared_with_each_other(limits: dict[str, int], pool2: Pool) -> None:
    shares = pool2.run(fit, "workers", 2, {}, trainer=True, max_epochs=4, **limits)
    batches = 3 if limits else 6
    assert [len(share) for share in shares] == [4 * 2 * batches] * 2


def test_a_stream_that_goes_on_is_not_closed_between_epochs(pool2: Pool) -> None:
    shares = pool2.run(fit, "kept", 0, {}, trainer=True, max_epochs=3, limit_train_batches=2)
    assert shares == [list(range(0, 24, 2)), list(range(1, 24, 2))]


@pytest.mark.parametrize(
    ("kind", "workers"),
    [("by rank", 0), ("by environment", 2), ("unseeded", 1), ("hf unseeded", 0), ("augmented", 0)],
)
def test_streams_that_are_not_one_are_an_error(kind: str, workers: int, pool2: Pool) -> None:
    for error in pool2.run(fit, kind, workers, {}, trainer=True):
        assert str(error).startswith("rank 0 and rank 1 read different streams (sample ")
        assert "of train), but each takes its share" in str(error)


def fit_later(kinds: list[str]) -> list[int] | str:
    """The same of a run that asks for another stream in each epoch."""
    module = TinyModule()
    module.train_dataloader = lambda: DataLoader(  # type: ignore[method-assign]
        MAKE[kinds[module.current_epoch]](), batch_size=2, collate_fn=collate
    )
    try:
        trainer(2, max_epochs=len(kinds), reload_dataloaders_every_n_epochs=1).fit(module)
    except ValueError as error:
        return str(error)
    return module.seen["train"]


def test_streams_of_later_epochs_are_compared(pool2: Pool) -> None:
    for error in pool2.run(fit_later, ["hf", "by rank"], trainer=True):
        assert str(error).startswith("rank 0 and rank 1 read different streams (sample 0 of train)")
    assert [len(share) for share in pool2.run(fit_later, ["hf", "workers"], trainer=True)] == [24, 24]


@pytest.mark.parametrize("workers", [0, 1])
def test_streams_that_part_ways_in_a_later_pass_are_told_of(workers: int, pool2: Pool) -> None:
    told = pool2.run(warnings_of, "shuffling", workers, trainer=True)[0]
    assert [text.partition(" read different")[0] for text in told] == ["in a later pass rank 0 and rank 1"]
    assert pool2.run(warnings_of, "workers", workers, trainer=True) == [[], []]


@pytest.mark.parametrize("kind", ["by rank", "on first rank"])
def test_streams_of_an_evaluation_that_are_not_one_are_an_error(kind: str, pool2: Pool) -> None:
    for error in pool2.run(evaluate, kind, trainer=True):
        assert str(error).startswith("rank 0 and rank 1 read different streams (sample 0 of validate)")
    shares = pool2.run(evaluate, "hf", trainer=True)
    assert sorted(shares[0] + shares[1]) == [0, *range(24)]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_group_shares_a_datapipe(workers: int, pool2: Pool) -> None:
    first, second = pool2.run(fit, "pipe", workers, {"tp": 2}, trainer=True)
    assert first == second
    assert sorted(first) == list(range(24))


def test_a_group_that_parts_ways_behind_a_buffer_is_told(pool2: Pool) -> None:
    for error in pool2.run(fit, "late", 0, {"tp": 2}, trainer=True):
        assert "different data in batch 10 of train" in str(error)
