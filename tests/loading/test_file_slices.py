"""Boxes of tensors in safetensors files: what slices of the tensors give, and next to no other bytes are read."""

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lightning_automodel.loading.safetensors import SlicedFile, float_dtypes

TENSORS = {
    "matrix": torch.randn(300, 1100),
    "wide": torch.randn(30, 9000),
    "experts": torch.randn(3, 40, 800).bfloat16(),
    "narrow": torch.arange(60_000).view(6000, 10),
    "flags": torch.rand(7, 5) > 0.5,
    "float8": torch.randn(16, 16).to(torch.float8_e4m3fn),
    "vector": torch.arange(9),
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(0, 4),
    "empty inside": torch.empty(2, 0, 3),
}


@pytest.fixture
def file(tmp_path: Path) -> SlicedFile:
    save_file(TENSORS, tmp_path / "x.safetensors")
    return SlicedFile(tmp_path / "x.safetensors", framework="pt", device="cpu", backend="mmap")


def same(one: Tensor, other: Tensor) -> bool:
    return (one.dtype, one.shape, one.tolist()) == (other.dtype, other.shape, other.tolist())


@pytest.mark.parametrize("name", TENSORS)
def test_boxes_are_those_of_the_tensor(file: SlicedFile, name: str) -> None:
    tensor, generator = TENSORS[name], random.Random(0)
    unread = file.get_slice(name)
    assert unread.get_shape() == list(tensor.shape)
    assert same(unread[...], tensor)
    assert same(unread[0:3] if tensor.ndim else unread[()], tensor[0:3] if tensor.ndim else tensor)
    for _ in range(10):
        bounds = [sorted(generator.choices(range(size + 1), k=2)) for size in tensor.shape]
        box = tuple(slice(*bound) if generator.random() < 0.7 else slice(None) for bound in bounds)
        part = unread[box]
        assert same(part, tensor[box])
        assert part.is_contiguous()


@pytest.mark.parametrize(
    ("name", "box", "most"),
    [
        ("matrix", (slice(100, 200),), 1.0),
        ("matrix", (slice(100, 200), slice(550, 1100)), 2.0),  # parts of 2,200 bytes: whole rows, too
        ("wide", (slice(10, 20), slice(0, 4000)), 1.0),
        ("experts", (slice(0, 3), slice(10, 20)), 1.0),
        ("experts", (slice(0, 3), slice(10, 20), slice(0, 400)), 2.0),  # and no rows of the other 30
        ("narrow", (slice(0, 6000), slice(0, 5)), 2.0),  # parts of 40 bytes: whole rows are read
    ],
)
def test_what_is_read(
    file: SlicedFile, monkeypatch: pytest.MonkeyPatch, name: str, box: tuple[slice, ...], most: float
) -> None:
    counts, original = [], os.preadv

    def counted(*args: Any) -> int:
        counts.append(original(*args))
        return counts[-1]

    monkeypatch.setattr(os, "preadv", counted)
    part = file.get_slice(name)[box]
    assert sum(counts) == most * part.nbytes
    assert len(counts) < 200
    before = sum(counts)
    assert file.get_slice(name)[...].shape == TENSORS[name].shape
    assert sum(counts) == before  # mapped: read where it is cut, if it is


def test_a_file_that_shrinks_while_it_is_read_is_an_error(file: SlicedFile, tmp_path: Path) -> None:
    os.truncate(tmp_path / "x.safetensors", 1000)
    with pytest.raises(OSError, match="ends at byte"):
        file.get_slice("matrix")[0:299]


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (-1, r"x.safetensors has \d+ of \d+ bytes"),
        (100, "not all of one"),
        (4, "not all of one"),
        (0, "not all of one"),
    ],
)
def test_a_file_without_its_end_is_named(file: SlicedFile, tmp_path: Path, size: int, said: str) -> None:
    path = tmp_path / "x.safetensors"
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)
    with pytest.raises(ValueError, match=f"{said}.*copy or download it anew"):
        SlicedFile(path, framework="pt", device="cpu", backend="mmap")


def test_a_file_of_another_kind_is_named(tmp_path: Path) -> None:
    for content in (b"version https://git-lfs.github.com/spec/v1\n", b"\x02" + bytes(7) + b"[]"):
        (tmp_path / "x.safetensors").write_bytes(content)
        with pytest.raises(ValueError, match="is no safetensors file"):
            float_dtypes([tmp_path / "x.safetensors"])


def test_a_closed_file_is_not_read(file: SlicedFile, tmp_path: Path) -> None:
    """Its descriptor is that of the next file that is opened."""
    unread = file.get_slice("matrix")
    file.__exit__(None, None, None)
    with (tmp_path / "x.safetensors").open("rb"), pytest.raises(ValueError, match="closed file"):
        unread[0:299]
