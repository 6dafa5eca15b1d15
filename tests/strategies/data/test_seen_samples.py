"""A run that goes on within an epoch sees what is left of it, in the order of the run that was not stopped."""

import re
import warnings
from itertools import islice
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, SubsetRandomSampler

from lightning_automodel import DDPStrategy
from lightning_automodel.finetuning.loader import ResumableLoader
from lightning_automodel.strategies.data.rest_of_epoch import RestOfOrder
from lightning_automodel.strategies.data.samplers import share_of_sampler
from lightning_automodel.testing.pool import Nursery, Pool
from tests.strategies.modules import SizedStream, Stream, loader
from tests.support.samplers import ByNumpy
from tests.support.training import SaveAfter, make_trainer

Step = tuple[int, int, int, list[int]]


# ---- orders, without processes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("replicas", "now"), [(2, 2), (2, 3), (3, 1), (1, 4)])
def test_what_is_left_of_an_order(replicas: int, now: int) -> None:
    data = DataLoader(range(23), shuffle=True)
    order = list(share_of_sampler(data, shuffle=True, equal=True, num_replicas=1, rank=0))
    seen = 4 * replicas
    samplers = [share_of_sampler(data, shuffle=True, equal=True, num_replicas=now, rank=rank) for rank in range(now)]
    shares = [list(RestOfOrder(sampler, seen)) for sampler in samplers]
    assert [len(RestOfOrder(sampler, seen)) for sampler in samplers] == [len(share) for share in shares]
    left = [index for together in zip(*shares, strict=True) for index in together]
    assert left == order[seen : seen + len(left)]
    assert 23 - seen - len(left) < now


# ---- runs ------------------------------------------------------------------------------------------------------------


class Watcher(L.LightningModule):
    """Notes epoch, batch, step and rows of every training step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.steps: list[Step] = []
        self.validated: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        batches = batch if isinstance(batch, list) and isinstance(batch[0], list) else [batch]
        seen = [int(row[0]) for (ids,) in batches for row in ids]
        self.steps.append((self.current_epoch, batch_idx, self.global_step, seen))
        return self.layer(batches[0][0][:, :1].float()).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(self.global_step)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Growing(BatchSampler):
    """Makes batches of 1, 2, 3, 1, 2, 3 ... samples."""

    def __iter__(self) -> Any:
        samples = iter(self.sampler)
        for count in range(len(self)):
            yield list(islice(samples, count % 3 + 1))

    def __len__(self) -> int:
        return len(self.sampler) // 2  # type: ignore[arg-type]


class Stateful(DataLoader):
    """Keeps a position of its own, of which nobody knows what it counts."""

    def state_dict(self) -> dict[str, int]:
        return {"mine": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state == {"mine": 1}


def data_of(kind: str, size: int) -> Any:
    """Training data of 23 or 24 rows, in batches of ``size``."""
    match kind:
        case "shuffled":
            return loader(23, size, shuffle=True)
        case "counted":
            return ResumableLoader(loader(23).dataset, batch_size=size, shuffle=True)
        case "with a state":
            return Stateful(loader(24).dataset, batch_size=size)
        case "workers":
            return loader(24, size, shuffle=True, num_workers=1)
        case "subset":
            return loader(24, size, sampler=SubsetRandomSampler(range(1, 24)))
        case "drawing":
            generator = torch.Generator().manual_seed(3)
            return loader(23, size, sampler=SubsetRandomSampler(range(23), generator=generator))
        case "by numpy":
            return loader(23, size, sampler=ByNumpy(23))
        case "growing":
            rows = loader(24).dataset
            return DataLoader(rows, batch_sampler=Growing(SequentialSampler(rows), size, True))
        case "order of batches":
            rows = loader(24).dataset
            return DataLoader(rows, sampler=BatchSampler(SequentialSampler(rows), size, False), batch_size=None)
        case "stream":
            return DataLoader(Stream(24), batch_size=size)
        case "sized stream":
            return DataLoader(SizedStream(23), batch_size=size, num_workers=1, persistent_workers=True)
        case "worker stream":
            return DataLoader(Stream(10), batch_size=size, num_workers=2)
        case "two":
            return CombinedLoader([loader(24, size, shuffle=True), loader(6, size, shuffle=True)], "max_size_cycle")
    raise AssertionError(kind)


def record(kind: str, path: Path, size: int, count: int | None, resume: Path | None, **settings: Any) -> Watcher:
    """A run of three epochs that saves when ``count`` batches are through, or goes on."""
    L.seed_everything(5, verbose=False)
    module = settings.pop("module", Watcher)()
    callbacks = [] if count is None else [SaveAfter(path, count)]
    run = make_trainer(settings.pop("strategy", DDPStrategy()), callbacks=callbacks, **{"max_epochs": 3, **settings})
    run.fit(module, data_of(kind, size), loader(2), ckpt_path=resume)
    return module


def both(path: Path, kind: str, count: int, **settings: Any) -> tuple[list[Step], list[Step], list[int], list[int]]:
    """The rest of a run that was not stopped, and that of one that goes on."""
    path = path / f"{kind}.ckpt"
    whole = record(kind, path, 2, count, None, **settings)
    again = record(kind, path, 2, None, path, **settings)
    begun = whole.steps[count][2]
    return whole.steps[count:], again.steps, [step for step in whole.validated if step >= begun], again.validated


def kinds(path: Path, everything: bool) -> dict[str, Any]:
    found = {"stream": both(path, "stream", 9)}
    found["subset"] = both(path, "subset", 8, accumulate_grad_batches=2, val_check_interval=3)
    found["drawing"] = both(path, "drawing", 9 if everything else 15)
    found["by numpy"] = both(path, "by numpy", 9 if everything else 15)
    if not everything:
        return found
    found["shuffled"] = both(path, "shuffled", 8)
    found["counted"] = both(path, "counted", 8)
    found["workers"] = both(path, "workers", 9)
    found["growing"] = both(path, "growing", 15)
    found["sized stream"] = both(path, "sized stream", 4, limit_train_batches=5)
    found["worker stream"] = both(path, "worker stream", 3)
    found["two"] = both(path, "two", 5, max_steps=20, max_epochs=-1)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_rest_is_that_of_the_run_that_was_not_stopped(
    nursery: Nursery, pool2: Pool, ranks: int, tmp_path: Path
) -> None:
    pool = pool2 if ranks == 2 else Pool(nursery, 1)
    for found in pool.run(kinds, tmp_path, ranks == 2, trainer=True):
        for kind, (expected, steps, *validated) in found.items():
            assert steps == expected, kind
            assert validated[0] == validated[1], kind


def steps_of(*arguments: Any, **settings: Any) -> list[Step]:
    return record(*arguments, **settings).steps


@pytest.mark.parametrize(("kind", "rows"), [("shuffled", 23), ("counted", 23), ("stream", 24)])
def test_other_sizes_see_each_sample_once(nursery: Nursery, pool2: Pool, kind: str, rows: int, tmp_path: Path) -> None:
    """Two ranks with batches of 2, then one with batches of 5, then two with batches of 1."""
    one = Pool(nursery, 1)
    first = pool2.run(steps_of, kind, tmp_path / "a", 2, 3, None, max_epochs=1, trainer=True)
    whole = one.run(steps_of, kind, tmp_path / "x", 2, None, None, max_epochs=1, trainer=True)[0]
    order = [row for *_, seen in whole for row in seen]
    second = one.run(steps_of, kind, tmp_path / "b", 5, 4, tmp_path / "a", max_epochs=1, trainer=True)[0]
    third = pool2.run(steps_of, kind, tmp_path / "c", 1, None, tmp_path / "b", max_epochs=1, trainer=True)
    by_rank = [[row for *_, seen in share[:3] for row in seen] for share in first]
    assert sorted(by_rank[0] + by_rank[1]) == sorted(order[:12])
    assert [row for *_, seen in second for row in seen] == order[12:]
    assert [len(seen) for *_, seen in second] == [5, 5, rows - 22]
    assert [row for steps in zip(*third, strict=True) for *_, seen in steps for row in seen] == order[17:23]


@pytest.mark.parametrize("kind", ["shuffled", "counted"])
def test_an_epoch_that_has_ended_is_not_begun_in_its_middle(
    nursery: Nursery, pool2: Pool, kind: str, tmp_path: Path
) -> None:
    """Saved behind the last of 6 batches on two ranks; one rank has 12 of the same size."""
    pool2.run(steps_of, kind, tmp_path / "a", 2, 6, None, max_epochs=1, trainer=True)
    one = Pool(nursery, 1)
    whole = one.run(steps_of, kind, tmp_path / "x", 2, None, None, max_epochs=2, trainer=True)[0]
    again = one.run(steps_of, kind, tmp_path / "b", 2, None, tmp_path / "a", max_epochs=2, trainer=True)[0]
    assert [step[0] for step in again] == [1] * 12
    assert [seen for *_, seen in again] == [seen for *_, seen in whole[12:]]
    assert [batch for _, batch, *_ in again] == list(range(12))


def go_on_with_batches(path: Path) -> tuple[bool, list[list[int]], list[str]]:
    """In batches of the same size, and of another one."""
    expected, steps, *_ = both(path, "order of batches", 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        other = record("order of batches", path, 6, None, path / "order of batches.ckpt", max_epochs=1)
    said = [str(warning.message) for warning in caught if "training data of the checkpoint" in str(warning.message)]
    return steps == expected, [seen for *_, seen in other.steps], said


def test_an_order_that_a_sampler_gives_in_batches(nursery: Nursery, tmp_path: Path) -> None:
    [(is_same, seen, said)] = Pool(nursery, 1).run(go_on_with_batches, tmp_path, trainer=True)
    assert is_same
    assert seen[0] == list(range(6, 12))  # about there: 8 were seen
    assert "read as 12 batches of 2 on 1 data ranks" in said[0]
    assert "now as 4 batches of 6" in said[0]


def warnings_of(path: Path, count: int, *, resumes: bool) -> list[str]:
    """What is said of a loader with a state of its own."""
    place = (None, path / "x.ckpt") if resumes else (count, None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        record("with a state", path / "x.ckpt", 2, *place, max_epochs=2)
    return [str(each.message) for each in caught if "holds states of Stateful" in str(each.message)]


@pytest.mark.parametrize(("count", "ranks", "warns"), [(4, 1, True), (4, 2, False), (6, 1, False)])
def test_a_state_of_other_data_ranks(
    nursery: Nursery, pool2: Pool, tmp_path: Path, count: int, ranks: int, warns: bool
) -> None:
    """Two ranks have 6 batches each; behind all of them states are those of a whole epoch."""
    assert not any(pool2.run(warnings_of, tmp_path, count, resumes=False, trainer=True))
    said = Pool(nursery, ranks).run(warnings_of, tmp_path, count, resumes=True, trainer=True)[0]
    assert bool(said) == warns
    assert not warns or "on 2 data ranks, and there are 1 now" in said[0]


def said_of_lightnings(path: Path, kind: str, count: int, *, resumes: bool) -> tuple[list[Step], list[str]]:
    """Steps, and what is said of them; first with Lightning's own strategy."""
    place: Any = (None, path) if resumes else (count, None)
    other: dict[str, Any] = {} if resumes else {"strategy": "auto"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps = record(kind, path, 2, *place, max_epochs=2, **other).steps
    said = [str(each.message) for each in caught]
    return steps, [one for one in said if "on rank 0 only" in one or "your dataloader is not resumable" in one]


@pytest.mark.parametrize(
    ("kind", "count", "expected"),
    [
        ("with a state", 5, "Stateful on rank 0 only, .* each of the 2 data ranks"),
        ("counted", 5, "ResumableLoader on rank 0 only"),
        ("shuffled", 5, "your dataloader is not resumable"),
        ("with a state", 12, None),
    ],
)
def test_what_lightnings_own_strategy_saved_says_little(
    kind: str, count: int, expected: str | None, nursery: Nursery, pool2: Pool, tmp_path: Path
) -> None:
    """Nothing of sizes: the count of batches goes on, behind a state of rank 0, or none."""
    path = tmp_path / "x.ckpt"
    _, none = Pool(nursery, 1).run(said_of_lightnings, path, kind, count, resumes=False, trainer=True)[0]
    steps, said = pool2.run(said_of_lightnings, path, kind, count, resumes=True, trainer=True)[0]
    assert not none
    assert steps[0][:3] == (count // 12, count % 12, count)
    assert len(said) == (expected is not None)
    assert expected is None or re.search(expected, said[0])
