"""Reads files of records: JSON lines, JSON arrays, CSV, Parquet, plain text, and each of them compressed.

::

    data.jsonl.gz -- opened by its last suffix --> lines -- by the one before --> (place, {"text": ...}), ...
"""

import bz2
import csv
import gzip
import io
import json
import lzma
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import IO, Any

Placed = tuple[str, Any]  # where a value stands (``file``, ``file:line`` or ``file:record``), and the value
_FORMS = {
    ".jsonl": "JSON lines",
    ".ndjson": "JSON lines",
    ".json": "JSON",
    ".csv": "CSV",
    ".tsv": "CSV",
    ".parquet": "Parquet",
    ".pq": "Parquet",
}
_COMPRESSED: dict[str, Callable[[Path], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": lambda path: _needs("zstandard", path).open(path, "rb"),
}
PLAIN = "plain text"


def form_of(file: Path) -> str:
    """Say what ``file`` is taken for, by its name."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    return _FORMS.get(suffixes[-1] if suffixes else "", PLAIN)


def read_values(file: Path) -> Iterator[Placed]:
    """Read the values of a file of records, each with its place.

    Raises:
        ValueError: naming file and line, for text that is not UTF-8, or is not of the form that the name promises.
    """
    form = form_of(file)
    if form == "Parquet":
        yield from _read_parquet(file)
    elif form == "CSV":
        yield from _read_csv(file, "\t" if ".tsv" in file.suffixes else ",")
    elif form == "JSON":
        yield from _read_json(file)
    else:
        yield from _read_lines(file)


def read_text(file: Path) -> str:
    """Read a text file, perhaps compressed.

    Raises:
        ValueError: naming the line, if it is not UTF-8.
    """
    with _opened(file) as stream:
        return _decoded(file, stream.read())


@contextmanager
def _opened(file: Path) -> Iterator[IO[bytes]]:
    opened = _COMPRESSED.get(file.suffix.lower(), lambda path: path.open("rb"))
    try:
        with opened(file) as stream:
            yield stream
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise ValueError(f"{file}: cannot be decompressed as {file.suffix} ({error})") from None


def _decoded(file: Path, data: bytes, first: int = 1) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + first
        raise ValueError(f"{file}:{line}: not UTF-8 ({error.reason}); convert the file or leave it out") from None


def _read_lines(file: Path) -> Iterator[Placed]:
    with _opened(file) as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield f"{file}:{number}", _parse(f"{file}:{number}", _decoded(file, line, number))


def _read_json(file: Path) -> Iterator[Placed]:
    """Read an array of records; or JSON lines, which many write under this name."""
    text = read_text(file)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        first = text.lstrip().partition("\n")[0]
        if error.msg == "Extra data" and first.startswith("{"):
            yield from _read_lines(file)
            return
        raise ValueError(f"{file}:{error.lineno}: not JSON ({error.msg} at column {error.colno})") from None
    if not isinstance(value, list):
        kind = "an object" if isinstance(value, dict) else f"a {type(value).__name__}"
        raise ValueError(f"{file}: {kind}; a .json file holds an array of records, or one record a line (.jsonl)")
    _refuse_surrogates(str(file), text, value)
    for number, record in enumerate(value, start=1):
        yield f"{file}:record {number}", record


def _parse(place: str, text: str) -> Any:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{place}: not JSON ({error.msg} at column {error.colno}); each line holds one object"
        ) from None
    _refuse_surrogates(place, text, value)
    return value


def _refuse_surrogates(place: str, text: str, value: Any) -> None:
    """Refuse half of a pair of surrogates, which JSON can spell and no text can hold."""
    if r"\ud" not in text.lower():
        return
    written = json.dumps(value, ensure_ascii=False)
    try:
        written.encode("utf-8")
    except UnicodeEncodeError as error:
        half = f"\\u{ord(written[error.start]):04x}"
        raise ValueError(
            f"{place}: {half} is half of a pair of surrogates; write the other half, or remove it"
        ) from None


def _read_csv(file: Path, delimiter: str) -> Iterator[Placed]:
    csv.field_size_limit(sys.maxsize)
    reader = csv.DictReader(io.StringIO(read_text(file), newline=""), delimiter=delimiter, strict=True)
    try:
        for row in reader:
            place = f"{file}:{reader.line_num}"
            if None in row or None in row.values():
                raise ValueError(
                    f"{place}: not as many fields as the header names ({', '.join(reader.fieldnames or ())})"
                )
            yield place, row
    except csv.Error as error:
        raise ValueError(f"{file}:{reader.line_num}: not CSV ({error})") from None


def _read_parquet(file: Path) -> Iterator[Placed]:
    parquet = _needs("pyarrow.parquet", file)
    try:
        content = parquet.ParquetFile(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: not Parquet ({error})") from None
    number = 0
    for batch in content.iter_batches():
        for record in batch.to_pylist():
            number += 1
            yield f"{file}:record {number}", record


def _needs(module: str, file: Path) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError:
        package = module.partition(".")[0]
        raise ValueError(f"{file} needs {package}, which is not installed; pip install {package}") from None
