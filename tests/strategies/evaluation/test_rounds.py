"""The protocol of evaluation in step, without processes: ranks are threads, and collectives meet at a barrier."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from lightning_automodel.strategies.evaluation import in_step
from lightning_automodel.strategies.evaluation.in_step import STREAM, DataRanks, Rounds, Step
from tests.support.waiting import Moves, played_cuda

TIMEOUT = 20.0


class Meeting:
    """Where the threads of one run exchange values."""

    def __init__(self, size: int) -> None:
        self.values: list[Any] = [None] * size
        self.barrier = threading.Barrier(size)

    def gather(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.barrier.wait(TIMEOUT)
        found = list(self.values)
        self.barrier.wait(TIMEOUT)
        return found


class Threads:
    """As ``DataRanks``."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank = meeting, rank

    def gather(self, loader: int, length: int, has_batch: bool) -> tuple[list[int], list[int]]:
        lengths, has = zip(*self.meeting.gather(self.rank, (length, int(has_batch))), strict=True)
        return list(lengths), list(has)

    def any(self, active: bool) -> bool:
        return any(self.meeting.gather(self.rank, active))

    def lend(self, step: Step | None, lender: int) -> Step:
        return self.meeting.gather(self.rank, step)[lender]


def evaluate(meeting: Meeting, rank: int, counts: list[int], is_stream: bool) -> list[tuple[int, str]]:
    """What one rank goes through: (loader, own batch or whose step it fills with), as Lightning's loop calls it."""
    seen: list[tuple[int, str]] = []

    def fill(step: str, arguments: tuple[Any, ...], loader: int | None) -> None:
        meeting.gather(rank, None)  # as FSDP2 does, a step meets the others
        seen.append((loader or 0, f"~{arguments[0]}"))

    lengths = [STREAM] * len(counts) if is_stream else counts
    rounds = Rounds(Threads(meeting, rank), lengths, fill=fill, end=lambda loader: None)  # type: ignore[arg-type]
    for at, count in enumerate(counts):
        for batch in range(count):
            rounds.advance(at)
            rounds.record("validation_step", (f"{rank}.{at}.{batch}",))
            meeting.gather(rank, None)
            seen.append((at, f"{rank}.{at}.{batch}"))
    rounds.advance(None)
    return seen


def run(counts: list[list[int]], is_stream: bool) -> list[list[tuple[int, str]]]:
    meeting = Meeting(len(counts))
    with ThreadPoolExecutor(len(counts)) as pool:
        running = [pool.submit(evaluate, meeting, rank, own, is_stream) for rank, own in enumerate(counts)]
        return [each.result(TIMEOUT) for each in running]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("seed", range(15))
def test_ranks_take_equally_many_steps_of_each_loader(seed: int, is_stream: bool) -> None:
    draw = random.Random(seed)
    ranks, loaders = draw.randint(2, 4), draw.randint(1, 3)
    counts = [[draw.choice((0, 0, 1, 2, 4)) for _ in range(loaders)] for _ in range(ranks)]
    for rank, seen in enumerate(run(counts, is_stream)):
        rounds = [max(each[loader] for each in counts) for loader in range(loaders)]
        assert [loader for loader, _ in seen] == [i for i, count in enumerate(rounds) for _ in range(count)]
        own = [name for _, name in seen if not name.startswith("~")]
        assert own == [f"{rank}.{i}.{n}" for i, count in enumerate(counts[rank]) for n in range(count)]


def test_who_has_no_batch_borrows_from_the_first_that_has() -> None:
    without, lender, other = run([[0], [2], [1]], is_stream=False)
    assert without == [(0, "~1.0.0"), (0, "~1.0.0")]
    assert lender == [(0, "1.0.0"), (0, "1.0.1")]
    assert other == [(0, "2.0.0"), (0, "~2.0.0")]


def test_a_rank_with_a_batch_does_not_wait_for_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_step.dist, "all_reduce", lambda *_, **__: None)
    group: Any = None
    with played_cuda(), Moves() as moves:
        assert DataRanks(group, torch.device("cuda"), lambda loader, ended: 0, "validate", lambda loader: None).any(
            True
        )
    assert not moves.found
