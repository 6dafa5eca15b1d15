"""Any length, window, padding, packing and choice of labels: the numbers of one process."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_automodel.config import FSDP2Config
from lightning_automodel.distributed.sequence_rows import chunk_bounds
from lightning_automodel.testing.pool import Pool
from tests.support.comparison import Batch, Schedule, compare
from tests.support.families import tiny_model

BOUND = 5e-5
ONE = Schedule(steps=1, micro_batches=1, clip=None)


@dataclass(frozen=True)
class Case:
    """One micro-batch of two rows.

    Attributes:
        length: tokens; some are too few to cut.
        window: of every other layer.
        kind: of padding, or packed documents.
        edge: how far a document ends from the edge of a chunk, or how many tokens are padding.
        labels: share of the rows, from the first, whose labels count.
        balanced: rows from the front and the back.
        exchange: of attention.
        implementation: of attention.
    """

    length: int
    window: int
    kind: str
    edge: int
    labels: float
    balanced: bool
    exchange: str
    implementation: str

    def draw(self, ranks: int, schedule: Schedule, step: int, data_rank: int) -> list[Batch]:
        ids = torch.randint(3, 100, (2, self.length), generator=torch.Generator().manual_seed(self.length))
        labels = ids.clone()
        labels[:, max(2, round(self.labels * self.length)) :] = -100
        return [{"input_ids": ids, "labels": labels, **self._beside(ranks)}]

    def _beside(self, ranks: int) -> Batch:
        place = torch.arange(self.length)
        if self.kind == "packed":
            edges = {stop for own in chunk_bounds(self.length, ranks, self.balanced) for _, stop in own}
            ends = sorted({min(max(edge + self.edge - 2, 1), self.length) for edge in edges})
            starts = torch.tensor([0, *ends])
            return {"position_ids": (place - starts[torch.searchsorted(starts, place, right=True) - 1]).expand(2, -1)}
        mask = torch.ones(2, self.length, dtype=torch.int64)
        if self.kind == "left":
            mask[0, : self.edge] = 0
        elif self.kind == "right":
            mask[1, self.length - self.edge :] = 0
        return {"attention_mask": mask} if self.kind != "plain" else {}


CASES = st.builds(
    Case,
    length=st.integers(6, 41),
    window=st.integers(2, 30),
    kind=st.sampled_from(["plain", "left", "right", "packed"]),
    edge=st.integers(1, 4),
    labels=st.sampled_from([1.0, 0.6, 0.2]),
    balanced=st.booleans(),
    exchange=st.sampled_from(["gather", "all_to_all", "auto"]),
    implementation=st.sampled_from(["sdpa", "eager"]),
)


def errors(cases: list[Case], ranks: int) -> list[tuple[float, str]]:
    """Runs on each rank: the largest error of each case."""
    return [_error(case, ranks) for case in cases]


def _error(case: Case, ranks: int) -> tuple[float, str]:
    changes: dict[str, Any] = {"sliding_window": case.window, "attn_implementation": case.implementation}
    config = FSDP2Config(cp_balance=case.balanced, cp_exchange=case.exchange)
    build = partial(tiny_model, "gemma3_text", **changes)
    return compare(build, {"cp": ranks}, ranks, ONE, config, draw=partial(case.draw, ranks)).largest


def check(cases: list[Case], pool: Pool) -> None:
    for found in pool.run(errors, cases, pool.world_size, timeout=240):
        assert [(case, error) for case, error in zip(cases, found, strict=True) if error[0] > BOUND] == []


QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@pytest.mark.slow
@settings(max_examples=1, **QUIET)
@given(cases=st.lists(CASES, min_size=4, max_size=4))
def test_any_batch(cases: list[Case], pool2: Pool) -> None:
    check(cases, pool2)


@pytest.mark.long
@settings(max_examples=6, **QUIET)
@given(cases=st.lists(CASES, min_size=8, max_size=8))
def test_many_batches(cases: list[Case], pool4: Pool) -> None:
    check(cases, pool4)
