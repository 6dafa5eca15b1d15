"""What the exchanges of keys and values skip, and what they keep for the backward pass."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_automodel.distributed.sequence_rows import Rows, chunk_bounds
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallel.context.exchange_gather import seen_keys
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.testing.pool import Pool
from tests.support.families import tiny_model


def rows_of_rank(rank: int) -> Rows:
    group: Any = SimpleNamespace(rank=lambda: rank, size=lambda: 4)
    return Rows(24, group, chunk_bounds(24, 4, balanced=True))


def bounds(seen: Tensor, rank: int) -> list[tuple[int, int]]:
    rows = rows_of_rank(rank)
    return seen_keys(rows.cut(seen, 0)[None, None], rows)


def test_keys_that_nobody_sees_are_skipped() -> None:
    causal = torch.ones(24, 24, dtype=torch.bool).tril()
    assert bounds(causal, 1) == [(0, 6), (0, 21)]
    window = causal.triu(-5)
    assert bounds(window, 0) == [(0, 3), (16, 24)]
    documents = causal & (torch.arange(24)[:, None] // 12 == torch.arange(24) // 12)
    assert bounds(documents, 2) == [(0, 9), (12, 18)]
    added = torch.zeros(24, 24).masked_fill(~window, torch.finfo(torch.float32).min)
    assert bounds(added, 3) == bounds(window, 3)


def test_a_row_without_keys_sees_all() -> None:
    """Its softmax is spread evenly over every key."""
    padded = torch.ones(24, 24, dtype=torch.bool).tril()
    padded[:, :2] = False
    assert bounds(padded, 0) == [(0, 24), (2, 24)]


class Reads(TorchDispatchMode):
    """Counts single values that the host reads."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return func(*args, **(kwargs or {}))


def test_what_all_chunks_see_is_read_at_once() -> None:
    """A device would be waited for with each value."""
    with Reads() as reads:
        assert bounds(torch.ones(24, 24, dtype=torch.bool).tril(), 1) == [(0, 6), (0, 21)]
        assert bounds(torch.zeros(24, 24, dtype=torch.bool), 1) == [(0, 24), (0, 24)]
    assert reads.count == 0


def saved_bytes(cp: int, windows: bool) -> int:
    """Runs on each rank: what the attention of one block keeps for the backward pass."""
    changes = {"sliding_window": 16} if windows else {}
    model = tiny_model("gemma3_text" if windows else "llama", max_position_embeddings=512, **changes)
    model = parallelize(model, build_mesh(resolve_sizes(2, cp=cp), "cpu")).train()
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    ids = torch.randint(3, 100, (1, 256))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model(input_ids=ids, labels=ids)
    return sum(kept.values())


def test_a_rank_keeps_its_share(pool2: Pool) -> None:
    """Also of keys, values, masks and logits."""
    for windows in (False, True):
        whole, parts = (max(pool2.run(saved_bytes, cp, windows)) for cp in (1, 2))
        assert parts < 0.6 * whole
