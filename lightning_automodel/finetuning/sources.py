"""Reads training documents from files and data sets; every error names the file and the line."""

import glob
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_automodel.finetuning.data_sets import PREFIX, is_saved_set, load_set, saved_set, stamp_of
from lightning_automodel.finetuning.formats import PLAIN, Placed, form_of, read_text, read_values

FORMS = '{"text": ...}, {"prompt": ..., "completion": ...} or {"messages": [...]}'
PAIR = '{"prompt": ..., "chosen": ..., "rejected": ...}'


@dataclass(frozen=True)
class TextRecord:
    """Plain text, trained on as a whole. ``place`` is ``file`` or ``file:line``."""

    place: str
    text: str


@dataclass(frozen=True)
class PromptRecord:
    """A prompt and what the model should answer."""

    place: str
    prompt: str
    completion: str


@dataclass(frozen=True)
class ChatRecord:
    """A conversation, as chat templates take it."""

    place: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = field(default=None)


Record = TextRecord | PromptRecord | ChatRecord


@dataclass(frozen=True)
class PairRecord:
    """Two answers to one prompt: both are chats, or both are texts."""

    place: str
    chosen: PromptRecord | ChatRecord
    rejected: PromptRecord | ChatRecord


def expand(patterns: str | Sequence[str]) -> list[Path]:
    """Lists the files and saved data sets that paths and globs (``**`` included) name, sorted, each once.

    Raises:
        ValueError: if a pattern names no file, or names another directory.
    """
    files: set[Path] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        if Path(pattern).is_dir():
            files.add(saved_set(Path(pattern)))
            continue
        found = [Path(name) for name in glob.glob(pattern, recursive=True) if Path(name).is_file()]
        if not found:
            raise ValueError(
                f"{pattern!r} matches no file in {Path.cwd()}; give a path or a glob such as 'data/**/*.jsonl'"
            )
        files.update(found)
    return sorted(files)


def read_records(files: Sequence[Path], columns: Mapping[str, str] | None = None) -> Iterator[Record]:
    """Reads the documents of ``files``: one per record, or per file of plain text.

    Args:
        files: each of the form that its name says (:func:`~lightning_automodel.finetuning.formats.form_of`).
        columns: from the keys of a record to those of the files: ``{"prompt": "question"}``.

    Raises:
        ValueError: naming file and line, for text that is not UTF-8, bad JSON, or a record of no known form.
    """
    for file in files:
        if form_of(file) == PLAIN:
            yield TextRecord(str(file), read_text(file))
        else:
            yield from (make_record(place, value, columns) for place, value in read_values(file))


def make_record(place: str, value: Any, columns: Mapping[str, str] | None = None) -> Record:
    """Make a record of what a file or a data set holds at ``place``.

    Args:
        place: for errors.
        value: a mapping with the keys of one of the forms.
        columns: from the keys of a record to those of ``value``.

    Raises:
        ValueError: naming the place, for anything else.
    """
    value = _renamed(place, value, columns, FORMS)
    if "messages" in value:
        return ChatRecord(place, _messages(place, value["messages"]), value.get("tools"))
    if "prompt" in value and "completion" in value:
        return PromptRecord(place, _string(place, value, "prompt"), _string(place, value, "completion"))
    if "text" in value:
        return TextRecord(place, _string(place, value, "text"))
    keys = ", ".join(sorted(map(str, value)))
    hint = "or say which of them are meant: columns={'prompt': 'question'}"
    raise ValueError(f"{place}: keys {keys} make no record; use {FORMS}, {hint}")


def make_pair(place: str, value: Any, columns: Mapping[str, str] | None = None) -> PairRecord:
    """Make a preference pair of what a file or a data set holds at ``place``.

    Args:
        place: for errors.
        value: a mapping with a prompt and two answers, as strings or as lists of messages.
        columns: from the keys of a record to those of ``value``.

    Raises:
        ValueError: naming the place, for anything else, and for two equal answers.
    """
    value = _renamed(place, value, columns, PAIR)
    missing = [key for key in ("prompt", "chosen", "rejected") if key not in value]
    if missing:
        raise ValueError(
            f"{place}: no {' and no '.join(map(repr, missing))} among the keys {', '.join(sorted(map(str, value)))}; a "
            f"pair is {PAIR}, or columns={{'prompt': 'question'}} says which keys are meant"
        )
    if value["chosen"] == value["rejected"]:
        raise ValueError(f"{place}: 'chosen' and 'rejected' are the same, so nothing is preferred; leave it out")
    chosen, rejected = (_answered(place, value, key) for key in ("chosen", "rejected"))
    return PairRecord(place, chosen, rejected)


def _answered(place: str, value: dict[str, Any], key: str) -> PromptRecord | ChatRecord:
    if isinstance(value["prompt"], list) and isinstance(value[key], list):
        return ChatRecord(place, _messages(place, [*value["prompt"], *value[key]]), value.get("tools"))
    return PromptRecord(place, _string(place, value, "prompt"), _string(place, value, key))


def _renamed(place: str, value: Any, columns: Mapping[str, str] | None, forms: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{place}: a {type(value).__name__}; a record is an object: {forms}")
    return {**value, **{key: value[column] for key, column in (columns or {}).items() if column in value}}


def _string(place: str, value: dict[str, Any], key: str) -> str:
    if not isinstance(value[key], str):
        raise ValueError(f"{place}: {key!r} is a {type(value[key]).__name__}; it must be a string")
    return value[key]


def _messages(place: str, messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{place}: 'messages' must be a list of at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or "role" not in message:
            raise ValueError(f'{place}: message {index} must be an object like {{"role": "user", "content": "..."}}')
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError(
            f"{place}: no message has the role 'assistant', so nothing is trained on; leave the record out"
        )
    return messages


@dataclass(frozen=True)
class Source:
    """A file, a data set that was saved, or one of the hub, by its name.

    Attributes:
        name: path, or a name that begins with ``hf:``.
    """

    name: str

    @property
    def is_set(self) -> bool:
        """Tell whether the library ``datasets`` reads it."""
        return self.name.startswith(PREFIX) or is_saved_set(Path(self.name))

    @property
    def form(self) -> str:
        """Say what it is taken for."""
        return "data set" if self.is_set else form_of(Path(self.name))

    def read(self, columns: Mapping[str, str] | None = None, *, streaming: bool = False) -> Iterator[Record]:
        """Read its documents."""
        if not self.is_set:
            yield from read_records([Path(self.name)], columns)
            return
        yield from (make_record(place, value, columns) for place, value in self.values(streaming=streaming))

    def values(self, *, streaming: bool) -> Iterator[Placed]:
        """Read its values, each with its place.

        Raises:
            ValueError: for plain text, which is one document and no values.
        """
        if self.is_set:
            for number, value in enumerate(load_set(self.name, streaming=streaming), start=1):
                yield f"{self.name}:row {number}", value
        elif self.form == PLAIN:
            raise ValueError(f"{self.name} is plain text; records stand in .jsonl, .json, .csv or .parquet files")
        else:
            yield from read_values(Path(self.name))

    def stamp(self) -> Any:
        """Return what changes when its content does."""
        return stamp_of(self.name) if self.is_set else _stamp_of_file(Path(self.name))


def find_sources(patterns: str | Sequence[str]) -> list[Source]:
    """Find what paths, globs and names of data sets mean: files sorted, each once, then data sets of the hub.

    Raises:
        ValueError: if one of them names nothing.
    """
    given = [patterns] if isinstance(patterns, str) else list(patterns)
    names = dict.fromkeys(pattern for pattern in given if pattern.startswith(PREFIX))
    paths = [pattern for pattern in given if pattern not in names]
    return [Source(str(path)) for path in (expand(paths) if paths else [])] + [Source(name) for name in names]


def _stamp_of_file(file: Path) -> list[Any]:
    return [str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns]
