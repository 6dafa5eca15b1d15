"""What a rank holds, against ``torch.chunk`` in the order in which tensor parallelism and FSDP2 cut."""

from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from lightning_automodel.checkpointing.files.dcp import Held, list_tensors, write_tensors
from lightning_automodel.checkpointing.files.reading import read_checkpoint
from lightning_automodel.checkpointing.files.storage import Location
from lightning_automodel.distributed.boxes import boxes_at
from lightning_automodel.distributed.shards import gather_on_rank_zero
from lightning_automodel.mesh import DP_SHARD, TP, axis, build_mesh, resolve_sizes
from lightning_automodel.testing.pool import Nursery, Pool
from tests.support.layouts import LAYOUTS
from tests.support.training import Recorder, SaveAfter, batches, make_trainer


def cut(rows: Tensor, count: int, index: int) -> Tensor:
    chunks = rows.chunk(count)
    return chunks[index] if index < len(chunks) else rows[:0]


@settings(max_examples=200, deadline=None)
@given(rows=st.integers(1, 70), dp=st.integers(1, 5), tp=st.integers(1, 5), stacked=st.integers(1, 3), data=st.data())
def test_pieces_are_what_the_cuts_leave(rows: int, dp: int, tp: int, stacked: int, data: st.DataObject) -> None:
    rows = rows if stacked == 1 else rows * stacked * tp
    i, j = data.draw(st.integers(0, dp - 1)), data.draw(st.integers(0, tp - 1))
    by_tp = Shard(0) if stacked == 1 else _StridedShard(0, split_factor=stacked)
    by_dp = Shard(0) if tp == 1 and stacked == 1 else _StridedShard(0, split_factor=tp)
    found = boxes_at((rows, 3), (2, dp, tp), (Replicate(), by_dp, by_tp), (1, i, j))
    matrices = torch.arange(rows).chunk(stacked)
    expected = cut(torch.cat([cut(matrix, tp, j) for matrix in matrices]), dp, i)
    actual = [row for box in found for row in range(box.offsets[0], box.offsets[0] + box.sizes[0])]
    assert actual == expected.tolist()
    assert all(box.offsets[1] == 0 and box.sizes[1] == 3 for box in found)


def test_partial_sums_have_no_boxes() -> None:
    with pytest.raises(ValueError, match="redistribute"):
        boxes_at((4,), (2,), (Partial(),), (0,))


def saved(rows: int, tp: int, directory: Path) -> dict[str, bool]:
    """Whether our gather, our folder and torch's distributed checkpoint give back what was cut."""
    mesh = build_mesh(resolve_sizes(dist.get_world_size(), tp=tp), "cpu")
    value = torch.randn(rows, 4)
    layer = nn.Linear(4, rows, bias=False)
    layer.weight = nn.Parameter(distribute_tensor(value, axis(mesh, TP), [Shard(0)]))
    fully_shard(layer, mesh=axis(mesh, DP_SHARD))
    whole = gather_on_rank_zero(layer.weight)
    write_tensors({"w": Held.of(layer.weight.detach(), "w")}, Location.of(directory / "ours"))
    ours = list_tensors(Location.of(directory / "ours"), weights_only=True)["w"].load()
    dcp.save({"w": layer.weight.detach()}, checkpoint_id=directory / "torch")
    torchs = torch.zeros(rows, 4)
    with suppress(dcp.CheckpointException):
        dcp.load({"w": torchs}, checkpoint_id=directory / "torch")
    return {
        "gathered": whole is None or torch.equal(whole, value),
        "ours": torch.equal(ours, value),
        "torch": torch.equal(torchs, value),
    }


@pytest.mark.parametrize(("rows", "torch_is_right"), [(7, False), (8, True)])
def test_uneven_shards_are_saved_right(nursery: Nursery, rows: int, torch_is_right: bool) -> None:
    """7 rows over tp=2 are 4 and 3, over dp=3 then 2 + 2 and 1 + 1 + 1: torch's offsets are wrong here."""
    results = Pool(nursery, 6).run(saved, rows, 2, with_directory=True)
    assert results == [{"gathered": True, "ours": True, "torch": torch_is_right}] * 6


class Rowless(nn.Module):
    """A parameter without rows beside one with some."""

    def __init__(self) -> None:
        super().__init__()
        self.none, self.some = (nn.Parameter(torch.ones(rows, 5)) for rows in (0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.none.sum() + self.some.sum() * x


class WithRowless(Recorder):
    def configure_model(self) -> None:
        super().configure_model()
        self.more = Rowless()

    def loss(self, batch: list[Tensor]) -> Tensor:
        return super().loss(batch) + self.more(batch[0].new_ones(())) / 100


def save_and_load(path: Path) -> list[tuple[int, ...]]:
    """Runs on each rank."""
    make_trainer(LAYOUTS["megatron3-dp2"].make(), max_steps=1, callbacks=[SaveAfter(path, 1)]).fit(
        WithRowless(), batches(2)
    )
    module = WithRowless()
    make_trainer(LAYOUTS["megatron3-dp2"].make()).validate(module, batches(2), ckpt_path=path, verbose=False)
    state = read_checkpoint(Location.of(path))["state_dict"]
    return [tuple(state[name].shape) for name in ("more.none", "more.some")]


def test_a_parameter_without_rows_is_saved(pool2: Pool, tmp_path: Path) -> None:
    assert pool2.run(save_and_load, tmp_path / "a.ckpt", trainer=True) == [[(0, 5), (3, 5)]] * 2
