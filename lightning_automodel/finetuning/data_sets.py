"""Opens data sets of the library ``datasets``: saved in a directory, or by their name on the hub, ``hf:owner/name``."""

import os
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

PREFIX = "hf:"
_SAVED, _SAVED_SPLITS = "state.json", "dataset_dict.json"
_OPTIONS = ("config", "split", "revision")


def is_saved_set(path: Path) -> bool:
    """Tell whether ``Dataset.save_to_disk`` wrote this directory."""
    return (path / _SAVED).is_file()


def saved_set(directory: Path) -> Path:
    """Return ``directory`` if a data set was saved there.

    Raises:
        ValueError: for any other directory, naming what could be meant.
    """
    if is_saved_set(directory):
        return directory
    if (directory / _SAVED_SPLITS).is_file():
        splits = sorted(path.name for path in directory.iterdir() if is_saved_set(path))
        raise ValueError(f"{str(directory)!r} holds the splits {', '.join(splits)}; name one: {directory / splits[0]}")
    raise ValueError(
        f"{str(directory)!r} is a directory; name the files in it, for example {str(directory / '*.txt')!r}"
    )


def load_set(name: str, *, streaming: bool = False) -> Iterable[dict[str, Any]]:
    """Open a data set.

    Args:
        name: directory, or ``hf:owner/name``, perhaps with ``?config=...&split=...&revision=...``. The split is
            ``train`` unless it is named.
        streaming: rows of the hub come as they are read.

    Raises:
        ValueError: if ``datasets`` is not installed, or finds nothing of this name.
    """
    if find_spec("datasets") is None:
        raise ValueError(f"{name} needs datasets, which is not installed; pip install lightning_automodel[data]")
    import datasets

    if not name.startswith(PREFIX):
        return datasets.load_from_disk(name)
    path, options = _parsed(name)
    try:
        return datasets.load_dataset(
            path,
            options.get("config"),
            split=options.get("split", "train"),
            revision=options.get("revision"),
            streaming=streaming,
        )
    except (OSError, ValueError, datasets.exceptions.DatasetNotFoundError) as error:
        first = str(error).strip().partition("\n")[0]
        raise ValueError(f"{name}: the hub gave no such data set: {first}") from error


def stamp_of(name: str) -> Any:
    """Return what changes when the content of a data set does: its name, and the files that hold it."""
    files = sorted(entry["filename"] for entry in load_set(name).cache_files)  # type: ignore[attr-defined]
    return [name, [[file, os.stat(file).st_size, os.stat(file).st_mtime_ns] for file in files]]


def _parsed(name: str) -> tuple[str, dict[str, str]]:
    path, _, query = name.removeprefix(PREFIX).partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    if unknown := sorted(options.keys() - set(_OPTIONS)):
        raise ValueError(f"{name}: {', '.join(unknown)} says nothing; after ? come {', '.join(_OPTIONS)}")
    return path, options
