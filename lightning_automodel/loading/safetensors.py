"""Reads boxes of the tensors in safetensors files, and no more than these boxes, into memory of their own.

safetensors maps the file, so that every page with a needed byte in it counts as the process's (of a matrix that is cut
by columns: all of them) and is brought in by faults; without a map it reads whole tensors. For a whole tensor the map
serves: what is cut later (Megatron-FSDP cuts what has its values) is then read later, and no more of it.
"""

import contextlib
import itertools
import json
import math
import os
from collections.abc import Iterable
from io import FileIO
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.modeling_utils import str_to_torch_dtype

from lightning_automodel.distributed.boxes import Span

_METADATA = "__metadata__"
_NEAR = 1 << 14
"""Bytes between two parts of a box, up to which reading them costs less than another call."""
_BLOCK = 1 << 20
"""Bytes of rows that are read at once where a box's parts are near; they stay in the processor's cache."""


class SlicedFile:
    """``safetensors.safe_open``, but ``get_slice`` gives a :class:`FileSlice`. Closed by ``__exit__``."""

    def __init__(self, filename: str | os.PathLike[str], *args: Any, **options: Any) -> None:
        self._header, self._start = read_header(filename)
        self._file = safe_open(filename, *args, **options)
        self._bytes = open(filename, "rb", buffering=0)  # noqa: SIM115  (closed by __exit__)

    def __enter__(self) -> "SlicedFile":
        return self

    def __exit__(self, *error: Any) -> None:
        self._bytes.close()
        self._file.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def get_slice(self, name: str) -> Any:
        """Returns an unread tensor; safetensors' own for a dtype that torch has no name for."""
        entry, mapped = self._header[name], self._file.get_slice(name)
        if entry["dtype"] not in str_to_torch_dtype:
            return mapped
        return FileSlice(mapped, self._bytes, self._start + entry["data_offsets"][0], entry["shape"])


def read_header(file: str | os.PathLike[str]) -> tuple[dict[str, Any], int]:
    """Reads what a file says of its tensors, and finds where the first of them begins, in bytes.

    Raises:
        ValueError: if the file ends before its tensors do, or is no safetensors file.
    """
    with open(file, "rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        there = os.fstat(opened.fileno()).st_size
        header: Any = None
        if 8 + size <= there:
            with contextlib.suppress(ValueError):  # of text or of JSON
                header = json.loads(opened.read(size))
    if not isinstance(header, dict):
        raise ValueError(f"{file} is no safetensors file, or not all of one ({there} bytes); copy or download it anew")
    stop = 8 + size + max((entry["data_offsets"][1] for name, entry in header.items() if name != _METADATA), default=0)
    if there < stop:
        raise ValueError(f"{file} has {there} of {stop} bytes; copy or download it anew")
    return header, 8 + size


def float_dtypes(files: Iterable[str | os.PathLike[str]]) -> set[torch.dtype]:
    """Returns the floating-point dtypes of ``files``; of files other than safetensors' own, the widest."""
    found: set[torch.dtype] = set()
    for file in files:
        if not str(file).endswith(".safetensors"):
            return {torch.float64}
        names = {entry.get("dtype") for entry in read_header(file)[0].values()}  # and metadata, which have none
        dtypes = [str_to_torch_dtype[name] for name in names if name in str_to_torch_dtype]
        found.update(dtype for dtype in dtypes if dtype.is_floating_point)
    return found


class FileSlice:
    """A tensor in a file, which is read where it is indexed.

    Args:
        mapped: safetensors' own.
        file: open; no slice is read when it is closed.
        start: of the tensor in the file, in bytes.
        shape: of the tensor.
    """

    def __init__(self, mapped: Any, file: FileIO, start: int, shape: list[int]) -> None:
        self._mapped, self._bytes, self._start, self._shape = mapped, file, start, shape
        self._dtype = str_to_torch_dtype[mapped.get_dtype()]

    def get_shape(self) -> list[int]:
        """Returns the shape of the whole tensor."""
        return list(self._shape)

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype that it has in the file."""
        return self._dtype

    def get_dtype(self) -> str:
        """Returns safetensors' name of the dtype."""
        return self._mapped.get_dtype()

    def __getitem__(self, index: Any) -> Tensor:
        """Reads a box into memory of its own, or views the mapped file if it is all of the tensor.

        Args:
            index: ``...``, a slice with step 1, or a tuple of such, as for a tensor.
        """
        spans = _spans(index, self._shape)
        sizes = [stop - start for start, stop in spans]
        if sizes == self._shape:
            return self._mapped[...]
        last = max(dim for dim, size in enumerate(self._shape) if sizes[dim] < size)
        between = (self._shape[last] - sizes[last]) * math.prod(self._shape[last + 1 :]) * self._dtype.itemsize
        if last > 0 and between <= _NEAR:
            return self._read_by_rows(spans, sizes, last)
        return self._read(spans, sizes, last)

    def _read(self, spans: list[Span], sizes: list[int], last: int) -> Tensor:
        """Reads run by run: what a box has of dimension ``last`` and those behind it lies together."""
        result = torch.empty(math.prod(sizes) * self._dtype.itemsize, dtype=torch.uint8)
        strides = [math.prod(self._shape[dim + 1 :]) * self._dtype.itemsize for dim in range(len(sizes))]
        length = math.prod(sizes[last:]) * self._dtype.itemsize
        first = self._start + sum(start * stride for (start, _), stride in zip(spans, strides, strict=True))
        steps = (range(0, size * stride, stride) for size, stride in zip(sizes[:last], strides, strict=False))
        target = result.numpy().data
        for begin, offsets in zip(range(0, len(target), length or 1), itertools.product(*steps), strict=bool(length)):
            _read_into(self._bytes.fileno(), target[begin : begin + length], first + sum(offsets))
        return result.view(self._dtype).view(sizes)

    def _read_by_rows(self, spans: list[Span], sizes: list[int], last: int) -> Tensor:
        """Reads rows along dimension ``last`` whole, some at a time into the same memory, and copies out of them."""
        result = torch.empty(sizes, dtype=self._dtype)
        strides = [math.prod(self._shape[dim + 1 :]) * self._dtype.itemsize for dim in range(last)]
        (start, end), (first, stop) = spans[last], spans[last - 1]
        count = min(max(1, _BLOCK // max(1, strides[-1])), max(1, stop - first))
        block = torch.empty((count, *self._shape[last:]), dtype=self._dtype)
        target = block.flatten().view(torch.uint8).numpy().data
        outer = itertools.product(*(range(*span) for span in spans[: last - 1]))
        for place, part in zip(outer, result.flatten(0, last - 1).split(max(1, stop - first)), strict=False):
            offset = self._start + sum(i * stride for i, stride in zip(place, strides, strict=False))
            for begin in range(first, stop, count):
                rows = min(count, stop - begin)
                _read_into(self._bytes.fileno(), target[: rows * strides[-1]], offset + begin * strides[-1])
                part[begin - first : begin - first + rows] = block[:rows, start:end]
        return result


def _spans(index: Any, shape: list[int]) -> list[Span]:
    items: tuple[slice, ...] = index if isinstance(index, tuple) else () if index is ... else (index,)
    items += (slice(None),) * (len(shape) - len(items))
    spans: list[Span] = []
    for item, size in zip(items, shape, strict=True):
        start, stop, step = item.indices(size)
        assert step == 1, f"{index} of a tensor in a file"
        spans.append((start, max(start, stop)))
    return spans


def _read_into(descriptor: int, target: memoryview, offset: int) -> None:
    while target:
        count = os.preadv(descriptor, [target], offset)
        if count == 0:
            raise OSError(f"the file ends at byte {offset}, before its tensors do")
        target, offset = target[count:], offset + count
