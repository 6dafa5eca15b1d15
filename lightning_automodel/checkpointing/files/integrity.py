"""Sizes and checksums of a checkpoint's files: written with them, compared before anything is loaded."""

import io
import json
import zipfile
from collections.abc import Mapping
from typing import IO, Any

import torch.distributed as dist
from zlib_ng.zlib_ng import crc32  # the sums of zlib's, by the processor's instructions

from lightning_automodel.checkpointing.files.storage import Location

CHECKSUMS = "checksums.json"
_BLOCK = 1 << 22  # bytes
Sums = dict[str, tuple[int, int]]
"""Size in bytes and CRC-32 by the name of the file."""


class SummingWriter(io.RawIOBase):
    """Passes on what is written, in order, and keeps its size and CRC-32."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.size = 0
        self.crc = 0

    def writable(self) -> bool:
        """Return ``True``, as a file does that is open for writing."""
        return True

    def write(self, data: Any) -> int:
        """Writes all of ``data``, and adds it to the sum."""
        self.crc = crc32(data, self.crc)
        count = self.file.write(data)
        self.size += count
        return count

    def tell(self) -> int:
        """Returns how many bytes have been written."""
        return self.size

    def flush(self) -> None:
        """Flushes the file below."""
        if not self.file.closed:
            self.file.flush()

    def fileno(self) -> int:
        """Returns the descriptor of the file below."""
        return self.file.fileno()


def sum_of(content: bytes) -> tuple[int, int]:
    """Computes size and CRC-32."""
    return len(content), crc32(content)


def to_json(sums: Sums) -> bytes:
    """Encodes the content of ``checksums.json``."""
    return json.dumps({name: {"bytes": size, "crc32": crc} for name, (size, crc) in sorted(sums.items())}).encode()


def edition_of(path: Location) -> int | None:
    """Sums up the checksums of a checkpoint, by which another one that has taken its name is told from it.

    Returns:
        the same on every machine; ``None`` where there are no checksums, or nothing.
    """
    if not path.is_folder():
        return _edition_of_archive(path) if path.is_file() else None
    try:
        return crc32((path / CHECKSUMS).read())
    except FileNotFoundError:
        return None


def replaced(path: Location) -> str:
    """Say that a checkpoint has changed while it was read."""
    return (
        f"{path} was replaced or deleted while it was loaded, by a process that saves checkpoints into {path.parent}; "
        "parts of two checkpoints are none. Start again, from a checkpoint whose name is not used again: "
        "with save_last=True, last.ckpt is (save_last='link' names a checkpoint that stays), and with save_top_k=1 each"
    )


def check_edition(path: Location, edition: int | None) -> None:
    """Check that a checkpoint is the one that had this ``edition``.

    Raises:
        ValueError: if another has taken its place.
    """
    if edition_of(path) != edition:
        raise ValueError(replaced(path))


def verify(path: Location) -> None:
    """Compares a checkpoint with what was written. Collective where processes are: each reads a part of it.

    Folders are compared with their ``checksums.json`` (those of other tools have none and pass), files with the
    checksums that ``torch.save`` puts into them.

    Raises:
        ValueError: on every rank, naming the first file that is damaged or missing.
    """
    size = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    faults: list[str | None] = [None] * size
    fault = _first_fault(path, rank, size)
    if size > 1:
        dist.all_gather_object(faults, fault)
    else:
        faults = [fault]
    found = [fault for fault in faults if fault is not None]
    if found:
        raise ValueError(f"{found[0]}. Nothing has been loaded; use another checkpoint")


def _first_fault(path: Location, rank: int, size: int) -> str | None:
    if not path.is_folder():
        return _fault_of_archive(path) if rank == 0 else None
    if not (path / CHECKSUMS).is_file():
        return None
    edition = edition_of(path)
    try:
        sums = json.loads((path / CHECKSUMS).read())
    except ValueError as error:
        return f"{path / CHECKSUMS} is damaged: {error}"
    faults = (_fault_of_file(path / name, sums[name]) for name in sorted(sums)[rank::size])
    fault = next((fault for fault in faults if fault is not None), None)
    return fault if fault is None or edition_of(path) == edition else replaced(path)


def _fault_of_file(file: Location, expected: Mapping[str, int]) -> str | None:
    if not file.is_file():
        return f"{file} is missing"
    size, crc = 0, 0
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            size, crc = size + len(block), crc32(block, crc)
    if size != expected["bytes"]:
        return f"{file} is damaged: it has {size} bytes, and {expected['bytes']} were written"
    if crc != expected["crc32"]:
        return f"{file} is damaged: its checksum (CRC-32) is {crc:08x}, and {expected['crc32']:08x} was written"
    return None


def _edition_of_archive(file: Location) -> int | None:
    with file.open("rb") as stream:
        try:
            entries = zipfile.ZipFile(stream).infolist()
        except (zipfile.BadZipFile, OSError):
            return None
    return crc32(repr([(entry.filename, entry.file_size, entry.CRC) for entry in entries]).encode())


def _fault_of_archive(file: Location) -> str | None:
    with file.open("rb") as stream:
        if stream.read(2) != b"PK":
            return None  # torch's older format has no checksums
        try:
            bad = zipfile.ZipFile(stream).testzip()
        except (zipfile.BadZipFile, OSError) as error:
            return f"{file} is damaged: {error}"
    return None if bad is None else f"{file} is damaged: the checksum of its entry {bad} is wrong"
