"""Which samples each rank sees: in a TP group the same, on data ranks different ones, in evaluation each one once."""

import dataclasses
import os
import pickle
from collections.abc import Iterator
from typing import Any

import hypothesis
import hypothesis.strategies as st
import lightning as L
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from lightning_automodel.strategies.data.digests import digest
from lightning_automodel.strategies.data.rest_of_epoch import RestOfOrder
from lightning_automodel.strategies.data.samplers import share_of_sampler
from lightning_automodel.strategies.data.streams import ShareOfStream, divides_itself, share_of_loader
from lightning_automodel.testing.pool import Nursery, Pool
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


def drawing(count: int, seed: int) -> SubsetRandomSampler:
    """A sampler with a generator of its own."""
    return SubsetRandomSampler(range(count), generator=torch.Generator().manual_seed(seed))


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 20),
    replicas=st.integers(1, 4),
    seed=st.integers(0, 99),
    before=st.integers(0, 3),
    data=st.data(),
)
def test_epochs_of_an_own_sampler_are_those_of_one_device(
    count: int, replicas: int, seed: int, before: int, data: st.DataObject
) -> None:
    """In a run from its beginning, and in one that makes up for passes of another, and goes on within the next one."""
    hypothesis.assume(count >= replicas)
    alone = drawing(count, seed)
    orders = [list(alone) for _ in range(before + 2)]
    shares: list[Any] = []
    for rank in range(replicas):
        loader = DataLoader(range(count), sampler=drawing(count, seed))  # type: ignore[arg-type]
        shares.append(share_of_sampler(loader, shuffle=True, equal=True, num_replicas=replicas, rank=rank))
    for share in shares:
        for epoch in range(before):
            share.read(*share.begin(epoch))
        share.set_epoch(before)
    seen = data.draw(st.integers(0, count))
    rest = [index for row in zip(*(RestOfOrder(share, seen) for share in shares), strict=True) for index in row]
    assert rest == orders[before][seen : seen + len(rest)]
    assert count - seen - len(rest) < replicas
    together = [index for row in zip(*shares, strict=True) for index in row]
    assert together == orders[before + 1][: count // replicas * replicas]


class Descending(Sampler):
    """An order that a user chose; from another sample on in each epoch."""

    def __init__(self, count: int) -> None:
        self.count, self.epoch = count, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return ((i - self.epoch) % self.count for i in reversed(range(self.count)))


def loader_of(kind: str, size: int) -> DataLoader:
    """Twelve rows, two for all data ranks together."""
    dataset: Any = TensorDataset(rows(12))
    generator = torch.Generator().manual_seed(3)
    of_user: dict[str, dict[str, Any]] = {
        "order": {"sampler": Descending(12)},
        "indices": {"sampler": [3, 1, 7, 5, 0, 11]},
        "weights": {"sampler": WeightedRandomSampler(torch.arange(1.0, 13), 8, generator=generator)},
        "fewer": {"sampler": RandomSampler(dataset, num_samples=6, generator=generator)},
        "more": {"sampler": RandomSampler(dataset, replacement=True, num_samples=20, generator=generator)},
        "batches": {"batch_sampler": BatchSampler(Descending(12), 2 // size, drop_last=False)},
        "batches of a shuffle": {"batch_sampler": BatchSampler(RandomSampler(dataset), 2 // size, drop_last=False)},
    }
    chosen = of_user[kind]
    return DataLoader(dataset, **({} if "batch_sampler" in chosen else {"batch_size": 2 // size}), **chosen)


KINDS = ("order", "indices", "weights", "fewer", "more", "batches", "batches of a shuffle")


def trained(on_one_device: bool, size: int) -> dict[str, list[int]]:
    """Runs on each rank: the rows of two epochs."""
    found = {}
    for kind in KINDS:
        module = TinyModule()
        strategy = SingleDeviceStrategy("cpu") if on_one_device else {"dp_shard": size}
        trainer(size, strategy, max_epochs=2).fit(module, loader_of(kind, size))
        found[kind] = module.seen["train"]
    return found


@pytest.mark.slow
def test_samplers_of_users_say_what_is_seen(nursery: Nursery, pool2: Pool) -> None:
    one = Pool(nursery, 1).run(trained, True, 1, trainer=True)[0]
    ranks = pool2.run(trained, False, 2, trainer=True)
    for kind, expected in one.items():
        together = [row for both in zip(*(rank[kind] for rank in ranks), strict=True) for row in both]
        if kind == "batches of a shuffle":  # in another order
            assert [sorted(together[:12]), sorted(together[12:])] == [list(range(12))] * 2
            assert together[:12] not in (sorted(together[:12]), together[12:])
        else:
            assert together == expected, kind


def test_a_share_is_transparent() -> None:
    stream = Stream(5)
    share = ShareOfStream(stream, 1, 2, drop_last=True)
    share.count = 7  # what a worker_init_fn does
    assert (share.count, stream.count) == (7, 7)
    assert not hasattr(share, "state_dict")
    copied = pickle.loads(pickle.dumps(share))
    assert (copied.count, len(list(copied))) == (7, 3)
    with pytest.raises(TypeError):
        len(share)
    share.dataset, share.rank, share.size, share.seen = own = ("inner", 5, 9, 2)  # names of its own
    assert (share.dataset, share.rank, share.size, share.seen) == own
    assert len(list(share)) == 3
    with torch.device("meta"):  # as under torch.set_default_device
        assert len(list(ShareOfStream(stream, 0, 2, drop_last=True))) == 3


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
    assert digest(batches[0]) == digest({"y": [1, "a", None], "x": torch.zeros(2)})


@dataclasses.dataclass
class Node:
    """A sample that holds others, and itself."""

    value: int
    others: list[Any]
    later: Any = dataclasses.field(init=False)


def test_digests_take_what_samples_hold() -> None:
    nodes = [Node(value, []) for value in (1, 1, 2)]
    for node in nodes:
        node.others += [node, Node]
    assert digest(nodes[0]) == digest(nodes[1]) != digest(nodes[2])
    complex_numbers = torch.tensor([1 + 2j])
    assert digest(complex_numbers.conj()) == digest(torch.tensor([1 - 2j])) != digest(complex_numbers)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert digest([nested, torch.ones(2, device="meta")]) == digest([nested, torch.ones(3, device="meta")])
