"""Sizes multiply to the number of processes, or the message says what would."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_automodel.mesh import MeshSizes, resolve_sizes

SIZE = st.integers(1, 6)


@given(tp=SIZE, cp=SIZE, dp_shard=SIZE, dp_replicate=SIZE)
def test_auto_takes_what_remains(tp: int, cp: int, dp_shard: int, dp_replicate: int) -> None:
    expected = MeshSizes(tp=tp, cp=cp, dp_shard=dp_shard, dp_replicate=dp_replicate)
    sizes = {"tp": tp, "cp": cp, "dp_replicate": dp_replicate}
    assert resolve_sizes(expected.world, **sizes) == expected
    assert resolve_sizes(expected.world, **sizes, dp_shard=dp_shard) == expected


@pytest.mark.parametrize(
    ("world", "sizes", "message"),
    [
        (8, {"tp": 3}, "tp=3 = 3 does not divide the 8 processes.*multiple of 3"),
        (8, {"tp": 2, "dp_shard": 2}, "dp_shard=2 x .*tp=2 = 4 does not equal the 8 processes.*auto"),
        (2, {"tp": 4, "dp_shard": 1}, "= 4 does not equal the 2 processes.*devices x num_nodes to 4"),
        (8, {"tp": 0}, "tp=0 is not a size"),
        (8, {"dp_shard": 0}, 'dp_shard=0 is not a size.*or "auto"'),
        (8, {"dp_shard": "all"}, "dp_shard='all' is not a size"),
        (8, {"dp_replicate": -1}, "dp_replicate=-1"),
        (8, {"tp": True}, "tp=True"),
        (8, {"tp": 2.0}, "tp=2.0"),
    ],
)
def test_sizes_that_do_not_fit(world: int, sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_sizes(world, **sizes)
