"""Which samples each rank sees: in a TP group the same, on data ranks different ones, in evaluation each one once."""

import os
import pickle
from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler, TensorDataset, get_worker_info

from lightning_automodel.strategies.data.agreement import digest
from lightning_automodel.strategies.data.samplers import (
    ShareOfStream,
    divides_itself,
    share_of_loader,
    share_of_sampler,
)
from lightning_automodel.testing.pool import Pool
from tests.strategies.modules import SizedStream, StockModule, Stream, TinyModule, loader, rows, trainer

Seen = list[dict[str, list[int]]]


# ---- shares of a stream, without processes ---------------------------------------------------------------------------


@pytest.mark.parametrize("count", range(8))
@pytest.mark.parametrize("size", [1, 2, 3])
def test_shares_of_a_stream(count: int, size: int) -> None:
    shares = [list(ShareOfStream(SizedStream(count), rank, size, drop_last=False)) for rank in range(size)]
    assert sorted(int(row[0]) for share in shares for (row,) in share) == list(range(count))
    for drop_last in (False, True):
        streams = [ShareOfStream(SizedStream(count), rank, size, drop_last) for rank in range(size)]
        assert [len(list(stream)) for stream in streams] == [len(stream) for stream in streams]
        if drop_last:
            assert {len(stream) for stream in streams} == {count // size}


@pytest.mark.parametrize("sampler", [None, SubsetRandomSampler(range(7))], ids=["shuffle", "own sampler"])
def test_training_draws_no_sample_twice(sampler: Any) -> None:
    loader = DataLoader(range(7), sampler=sampler)
    shares = [list(share_of_sampler(loader, shuffle=True, equal=True, num_replicas=2, rank=rank)) for rank in range(2)]
    assert [len(share) for share in shares] == [3, 3]
    assert len({*shares[0], *shares[1]}) == 6


def test_a_share_is_transparent() -> None:
    stream = Stream(5)
    share = ShareOfStream(stream, 1, 2, drop_last=True)
    share.count = 7  # what a worker_init_fn does
    assert (share.count, stream.count) == (7, 7)
    assert not hasattr(share, "state_dict")
    copied = pickle.loads(pickle.dumps(share))
    assert (copied.count, copied.rank, len(list(copied))) == (7, 1, 3)
    with pytest.raises(TypeError):
        len(share)


class SplitByNode(Stream):
    """What Hugging Face's split_dataset_by_node leaves behind."""

    _distributed = object()


def test_a_stream_that_is_divided_already_is_left_alone() -> None:
    assert [divides_itself(stream(4)) for stream in (Stream, SplitByNode, ShardedStream)] == [False, True, True]


class OwnLoader(DataLoader):
    def __init__(self, name: str) -> None:
        super().__init__(Stream(6), batch_size=2, num_workers=0, collate_fn=len, timeout=0)
        self.name = name


def test_a_loader_keeps_its_class_and_attributes() -> None:
    shared = share_of_loader(OwnLoader("mine"), 0, 2, drop_last=True)
    assert isinstance(shared, OwnLoader)
    assert (shared.name, shared.batch_size, shared.collate_fn) == ("mine", 2, len)
    assert list(shared) == [2, 1]
    workers = DataLoader(Stream(6), num_workers=1, persistent_workers=True)
    shared = share_of_loader(workers, 0, 2, drop_last=True)
    assert (shared.num_workers, shared.persistent_workers) == (1, True)
    assert [int(row[0, 0]) for (row,) in shared] == [0, 2, 4]
    assert len(list(workers)) == 6


class WorkerStream(IterableDataset):
    """Divides its rows among its workers, as torch's documentation shows."""

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        assert worker is not None
        return iter(range(worker.id, 10, worker.num_workers))


def test_workers_divide_a_share() -> None:
    parts = [list(share_of_loader(DataLoader(WorkerStream(), num_workers=2), r, 2, drop_last=False)) for r in (0, 1)]
    assert sorted(int(x) for part in parts for x in part) == list(range(10))


# ---- fits on two and four ranks --------------------------------------------------------------------------------------


class ShardedStream(Stream):
    """Takes its own share."""

    sharded_by_data_rank = True

    def __iter__(self) -> Any:
        return ((row,) for row in rows(self.count)[dist.get_rank() :: dist.get_world_size()])


class Augmented(TensorDataset):
    """Adds a random column, drawn in the worker."""

    def __getitem__(self, index: int) -> Any:
        (row,) = super().__getitem__(index)
        return (torch.cat([row, torch.randint(61, (1,))]),)


def fit(tp: int, kind: str, stock: bool = False) -> dict[str, list[int]]:
    """The rows that this rank trained and validated on."""
    torch.manual_seed(rank())  # ranks are not seeded alike
    module = StockModule() if stock else TinyModule()
    data, kwargs = training_data(kind)
    if kind == "workers":
        L.seed_everything(3, workers=True, verbose=False)
    run = trainer(world(), {"tp": tp}, stock=stock, use_distributed_sampler=kind != "unmanaged", **kwargs)
    run.fit(module, data, loader(3) if kind == "shuffled" else DataLoader(Stream(3)))
    return module.seen


def training_data(kind: str) -> tuple[DataLoader, dict[str, Any]]:
    match kind:
        case "shuffled" | "unmanaged":
            return loader(8, 2, shuffle=True), {}
        case "subset":
            return loader(9, sampler=SubsetRandomSampler(range(1, 9))), {}
        case "stream":
            return DataLoader(Stream(9), batch_size=2), {}
        case "sharded":
            return DataLoader(ShardedStream(8), batch_size=2), {}
        case "workers":
            return DataLoader(Augmented(rows(8)), batch_size=2, num_workers=1), {}
    raise AssertionError(kind)


def world() -> int:
    return int(os.environ["WORLD_SIZE"])


def rank() -> int:
    return int(os.environ["RANK"])


@pytest.mark.parametrize("kind", ["unmanaged", "subset", "stream", "workers"])
def test_a_tensor_parallel_group_sees_the_same(kind: str, pool2: Pool) -> None:
    first, second = pool2.run(fit, 2, kind, trainer=True)
    assert first == second
    assert first["validate"] == [0, 1, 2]


def test_lightning_gives_a_tensor_parallel_group_different_batches(pool2: Pool) -> None:
    first, second = pool2.run(fit, 2, "unmanaged", stock=True, trainer=True)
    assert first["train"] != second["train"]


@pytest.mark.parametrize("kind", ["shuffled", "subset", "stream", "sharded"])
def test_data_ranks_divide_the_samples(kind: str, pool2: Pool) -> None:
    seen: Seen = pool2.run(fit, 1, kind, trainer=True)
    expected = range(1, 9) if kind == "subset" else range(8)
    assert sorted(seen[0]["train"] + seen[1]["train"]) == list(expected)
    assert (seen[0]["validate"], seen[1]["validate"]) == ([0, 2], [1])


@pytest.mark.parametrize("kind", ["subset", "stream"])
def test_lightning_gives_data_ranks_the_same_samples(kind: str, pool2: Pool) -> None:
    seen: Seen = pool2.run(fit, 1, kind, stock=True, trainer=True)
    assert len(set(seen[0]["train"] + seen[1]["train"])) < len(seen[0]["train"] + seen[1]["train"])


def test_data_ranks_and_tensor_parallel_groups(pool4: Pool) -> None:
    seen: Seen = pool4.run(fit, 2, "stream", trainer=True)
    assert seen[0] == seen[1]
    assert seen[2] == seen[3]
    assert sorted(seen[0]["train"] + seen[2]["train"]) == list(range(8))


# ---- mistakes --------------------------------------------------------------------------------------------------------


class ByGlobalRank(Stream):
    """What users of data parallelism write: every process reads a part of its own."""

    sharded_by_data_rank = True

    def __iter__(self) -> Any:
        return ((row,) for row in rows(self.count)[dist.get_rank() :: 2])


def fit_wrong(tp: int, uneven: bool) -> str:
    """The error that this rank meets."""
    data = loader(2 + rank()) if uneven else DataLoader(ByGlobalRank(4))
    run = trainer(world(), {"tp": tp}, use_distributed_sampler=False)
    with pytest.raises(ValueError, match="rank") as raised:
        run.fit(TinyModule(), data)
    return str(raised.value)


def test_different_batches_are_an_error_on_every_rank(pool4: Pool) -> None:
    errors = pool4.run(fit_wrong, 2, uneven=False, trainer=True)
    assert ["rank 0 and rank 1 have different data in batch 0 of train" in error for error in errors[:2]] == [True] * 2
    assert ["rank 2 and rank 3" in error and "strategy.data_rank" in error for error in errors[2:]] == [True] * 2


def test_different_numbers_of_training_batches_are_an_error(pool2: Pool) -> None:
    errors = pool2.run(fit_wrong, 1, uneven=True, trainer=True)
    assert errors[0] == errors[1]
    assert "rank 0: 2, rank 1: 3" in errors[0]
    assert "limit_train_batches=2" in errors[0]


def test_digests_see_every_value() -> None:
    batches: list[Any] = [
        {"x": torch.zeros(2), "y": [1, "a", None]},
        {"x": torch.zeros(2), "y": [1, "b", None]},
        {"x": torch.zeros(2), "y": [2, "a", None]},
        {"x": torch.zeros(1, 2), "y": [1, "a", None]},
        {"x": torch.zeros(2, dtype=torch.bfloat16), "y": [1, "a", None]},
        {"x": torch.tensor([0.0, 1e-30]), "y": [1, "a", None]},
        {"z": torch.zeros(2), "y": [1, "a", None]},
        {"x": torch.tensor(0.0), "y": (1, "a", None)},
        {"x": torch.empty(0), "y": torch.zeros(2, dtype=torch.bool).numpy()},
    ]
    assert len({digest(batch) for batch in batches}) == len(batches)
    assert digest(batches[0]) == digest({"x": torch.zeros(2), "y": [1, "a", None]})
