"""What the planner says of a step is what real ranks count: collectives, bytes, FLOPs and memory, layout by layout."""

from collections.abc import Callable
from functools import cache

import pytest
import torch

from lightning_automodel.planner.watch import Watched
from lightning_automodel.testing.pool import Nursery, Pool
from tests.planner.subjects import LAYOUTS, Real, play_layout, run_really
from tests.support.marks import with_long, with_slow


@cache
def played(name: str, rank: int = 0) -> Watched:
    return play_layout(LAYOUTS[name], rank)


@pytest.fixture(scope="module")
def real(nursery: Nursery) -> Callable[[str], Real]:
    """What rank 0 counted, by layout; each runs once."""
    return cache(lambda name: Pool(nursery, LAYOUTS[name].ranks).run(run_really, name, timeout=120)[0])


LONG = (
    "dp2-accumulated",
    "tp2",
    "dp2",
    "cp2",
    "dp2-tp2-sequence",
    "replicas2-shards2",
    "dp2-cp2-gathered",
    "dp4-ep2",
    "cp2-tp2-sequence",
    "dp2-tp2-ep2",
    "dp2-lora-bf16",
    "dp2-frozen",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", with_long(LAYOUTS, *LONG))
def test_a_played_step_is_a_real_one(real: Callable[[str], Real], name: str) -> None:
    expected, measured = played(name), real(name)
    assert expected.counts == measured.watched.counts
    assert expected.volume == measured.watched.volume
    assert sum(expected.counts.values()) == measured.calls  # gloo's own count
    assert expected.flops == measured.watched.flops
    assert expected.saved == measured.watched.saved
    for role, size in measured.bytes.items():
        assert expected.peaks["clipping"][role] == size


UNSEEN = ("dp2-accumulated", "dp2-tp2-sequence")


SEEN = with_long((name for name in LAYOUTS if name not in UNSEEN), *LONG)


@pytest.mark.parametrize("name", with_slow(SEEN, "tp2-lora", "dp2-lora", "tp2-sequence"))
def test_saved_activations_are_what_autograd_saves(real: Callable[[str], Real], name: str) -> None:
    """By torch's hooks, which see no micro-batches before the last, and nothing in selective checkpointing."""
    saved = played(name).saved
    assert saved["activations"] + saved["head and loss"] == pytest.approx(real(name).saved, rel=0.05)


@pytest.mark.slow
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
