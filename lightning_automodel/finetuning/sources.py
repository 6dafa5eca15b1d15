"""Reads training documents from text and JSONL files; every error names the file and the line."""

import glob
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FORMS = '{"text": ...}, {"prompt": ..., "completion": ...} or {"messages": [...]}'


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


def expand(patterns: str | Sequence[str]) -> list[Path]:
    """Lists the files that paths and globs (``**`` included) name, sorted, each once.

    Raises:
        ValueError: if a pattern names no file, or names a directory.
    """
    files: set[Path] = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        if Path(pattern).is_dir():
            raise ValueError(
                f"{pattern!r} is a directory; name the files in it, for example {pattern.rstrip('/') + '/*.txt'!r}"
            )
        found = [Path(name) for name in glob.glob(pattern, recursive=True) if Path(name).is_file()]
        if not found:
            raise ValueError(
                f"{pattern!r} matches no file in {Path.cwd()}; give a path or a glob such as 'data/**/*.jsonl'"
            )
        files.update(found)
    return sorted(files)


def read_records(files: Sequence[Path]) -> Iterator[Record]:
    """Reads the documents of ``files``: one per line of a ``.jsonl`` file, one per file of any other.

    Raises:
        ValueError: naming file and line, for text that is not UTF-8, bad JSON, or a record of no known form.
    """
    for file in files:
        if file.suffix == ".jsonl":
            yield from _read_jsonl(file)
        else:
            yield TextRecord(str(file), _read_text(file))


def _read_text(file: Path) -> str:
    data = file.read_bytes()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{file}:{line}: not UTF-8 ({error.reason}); convert the file or leave it out") from None


def _read_jsonl(file: Path) -> Iterator[Record]:
    for number, line in enumerate(_read_text(file).split("\n"), start=1):
        if line.strip():
            place = f"{file}:{number}"
            yield _record(place, _parse(place, line))


def _parse(place: str, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{place}: not JSON ({error.msg} at column {error.colno}); each line holds one object"
        ) from None
    if not isinstance(value, dict):
        raise ValueError(f"{place}: a {type(value).__name__}; each line holds one object: {FORMS}")
    return value


def _record(place: str, value: dict[str, Any]) -> Record:
    if "messages" in value:
        return ChatRecord(place, _messages(place, value["messages"]), value.get("tools"))
    if "prompt" in value and "completion" in value:
        return PromptRecord(place, _string(place, value, "prompt"), _string(place, value, "completion"))
    if "text" in value:
        return TextRecord(place, _string(place, value, "text"))
    raise ValueError(f"{place}: keys {sorted(value)} make no record; use {FORMS}")


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
