"""What the planner says of a step is what real ranks count: collectives, bytes, FLOPs and memory, layout by layout."""

from functools import cache
from typing import Any

import pytest
import torch

from lightning_automodel.planner.watch import Watched
from tests.planner.subjects import LAYOUTS, Real, play_layout, run_really

_kept: dict[int, dict[str, Real]] = {}


@cache
def played(name: str, rank: int = 0) -> Watched:
    return play_layout(LAYOUTS[name], rank)


def run_all(ranks: int) -> dict[str, Real]:
    """Every layout of so many ranks, in the same processes."""
    return {name: run_really(name) for name, layout in LAYOUTS.items() if layout.ranks == ranks}


@pytest.fixture
def real(request: pytest.FixtureRequest) -> Any:
    """What rank 0 counted, by layout; each number of ranks runs once."""

    def of(name: str) -> Real:
        ranks = LAYOUTS[name].ranks
        if ranks not in _kept:
            pool = request.getfixturevalue(f"pool{ranks}")
            _kept[ranks] = pool.run(run_all, ranks, timeout=180)[0]
        return _kept[ranks][name]

    return of


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_played_step_is_a_real_one(real: Any, name: str) -> None:
    expected, measured = played(name), real(name)
    assert expected.counts == measured.watched.counts
    assert expected.volume == measured.watched.volume
    assert sum(expected.counts.values()) == measured.calls  # gloo's own count
    assert expected.flops == measured.watched.flops
    assert expected.saved == measured.watched.saved
    for role, size in measured.bytes.items():
        assert expected.peaks["clipping"][role] == size


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name not in ("dp2-accumulated", "dp2-tp2-sequence")])
def test_saved_activations_are_what_autograd_saves(real: Any, name: str) -> None:
    """By torch's hooks, which see no micro-batches before the last, and nothing in selective checkpointing."""
    saved = played(name).saved
    assert saved["activations"] + saved["head and loss"] == pytest.approx(real(name).saved, rel=0.05)


def test_every_rank_sends_as_much_as_its_place_says() -> None:
    one, last = (played("cp2-tp2-sequence", rank) for rank in (0, 3))
    assert one.counts == last.counts
    assert one.volume == last.volume


def test_nothing_is_left_of_a_played_run() -> None:
    before = torch.Tensor.as_subclass, torch.cuda.Stream, torch.UntypedStorage.resize_
    play_layout(LAYOUTS["tp2"])
    assert (torch.Tensor.as_subclass, torch.cuda.Stream, torch.UntypedStorage.resize_) == before
    assert not torch.distributed.is_initialized()
    assert torch.ones(2).sum().item() == 2
