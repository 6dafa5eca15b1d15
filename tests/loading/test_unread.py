"""Tensors that are moved before they are read: boxes are those of the moved tensor, and no other bytes are read."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lightning_automodel.loading.safetensors import SlicedFile
from lightning_automodel.loading.unread_tensors import NotAMove, UnreadTensor, unread

TENSORS = {name: torch.randn(6, 4, 8) for name in "abc"}
MOVES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "chunk": lambda a, b, c: torch.chunk(a, 3, dim=2)[2],
    "split": lambda a, b, c: torch.split(a, [1, 2, 5], dim=-1)[1],
    "join": lambda a, b, c: torch.cat([a, b, c], dim=-1),
    "experts": lambda a, b, c: torch.cat([torch.stack([a[0], b[0]]), torch.stack([a[1], c[5]])], dim=1),
    "transposed": lambda a, b, c: torch.transpose(a, -1, -2).contiguous(),
    "matrix": lambda a, b, c: torch.cat([a.unbind()[2].t(), b[3].T], dim=1),
    "squeezed": lambda a, b, c: torch.stack([x.squeeze(0) for x in torch.chunk(a, 6)], dim=2),
    "permuted": lambda a, b, c: a.permute(2, 0, 1)[1:5].unsqueeze(0),
}


@pytest.fixture
def entries(tmp_path: Path) -> list[UnreadTensor]:
    save_file(TENSORS, tmp_path / "x.safetensors")
    file = SlicedFile(tmp_path / "x.safetensors", framework="pt", device="cpu", backend="mmap")
    return [unread(file.get_slice(name), torch.float32, None) for name in TENSORS]


@pytest.mark.parametrize("name", MOVES)
def test_boxes_are_those_of_the_moved_tensor(entries: list[UnreadTensor], name: str) -> None:
    expected, moved = MOVES[name](*TENSORS.values()), MOVES[name](*entries)
    assert isinstance(moved, UnreadTensor)
    assert moved.shape == expected.shape
    assert torch.equal(moved.read(), expected)
    generator = random.Random(0)
    for _ in range(20):
        spans = [tuple(sorted(generator.choices(range(size + 1), k=2))) for size in expected.shape]
        box = expected[tuple(slice(*span) for span in spans)]
        target = torch.full(box.shape, torch.nan)
        moved.fill(spans, target)
        assert torch.equal(target, box)
        assert sum(x.numel() for _, _, x in moved.moved.reads(spans, target)) == box.numel()


OTHERS: dict[str, Callable[[Tensor, Tensor, Tensor], object]] = {
    "sum": lambda a, b, c: a + b,
    "reshape": lambda a, b, c: a.reshape(24, 8),
    "in place": lambda a, b, c: a.mul_(2),
    "gaps": lambda a, b, c: a[:, ::2],
    "with a tensor": lambda a, b, c: torch.cat([a, torch.zeros(1, 4, 8)]),
    "value": lambda a, b, c: bool(a.any()),
    "comparison": lambda a, b, c: a == b,
    "cast": lambda a, b, c: a.bfloat16(),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_move_is_refused(entries: list[UnreadTensor], name: str) -> None:
    a, b, c = entries
    with pytest.raises(NotAMove):
        OTHERS[name](a, b, c)
