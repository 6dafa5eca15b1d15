"""Who holds which rows: arithmetic, and the collectives that are each other's adjoints."""

from itertools import chain

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Shard

from lightning_automodel.distributed.sequence_rows import Rows, chunk_bounds, gather_parts, gather_whole, sum_parts
from lightning_automodel.testing.pool import Pool


@given(length=st.integers(1, 200), ranks=st.integers(1, 9), balanced=st.booleans())
def test_each_row_has_one_owner(length: int, ranks: int, balanced: bool) -> None:
    chunks = chunk_bounds(length, ranks, balanced)
    owned = list(chain.from_iterable(range(*bounds) for own in chunks for bounds in own))
    assert sorted(owned) == list(range(length))
    for rank, own in enumerate(chunks):
        assert sum(stop - start for start, stop in own) == Shard.local_shard_size_and_offset(length, ranks, rank)[0]
        assert list(own) == sorted(own)


def test_balanced_ranks_see_equally_many_pairs() -> None:
    assert chunk_bounds(24, 4, True)[1] == ((3, 6), (18, 21))
    pairs = [sum(row + 1 for a, b in own for row in range(a, b)) for own in chunk_bounds(24, 4, True)]
    assert len(set(pairs)) == 1


def collectives() -> None:
    for length, balanced in ((11, True), (8, False), (9, True)):
        rows = Rows.divide(length, dist.group.WORLD, balanced)  # type: ignore[arg-type]
        whole = torch.arange(2.0 * length * 3).view(2, length, 3)
        own = rows.cut(whole, 1).requires_grad_()
        weight = torch.randn(whole.shape, generator=torch.Generator().manual_seed(dist.get_rank()))
        joined = gather_parts(own, 1, rows)
        assert joined.equal(whole)
        (summed,) = torch.autograd.grad(joined, own, weight)
        total = weight.clone()
        dist.all_reduce(total)
        torch.testing.assert_close(summed, rows.cut(total, 1))
        (sliced,) = torch.autograd.grad(gather_whole(own, 1, rows, 3.0), own, weight)
        assert sliced.equal(rows.cut(weight, 1) * 3)
        assert rows.cut(rows.order(), 0).shape[0] == rows.count
        (scaled,) = torch.autograd.grad(sum_parts(own.sum(), rows.group, 2.0), own)
        assert scaled.equal(torch.full_like(own, 2.0))


def test_collectives_are_adjoints(pool2: Pool) -> None:
    pool2.run(collectives)
