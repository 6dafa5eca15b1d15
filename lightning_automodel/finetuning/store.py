"""Tokenized documents in memory-mapped files: tokenized once per node, shared by its processes."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from lightning_automodel.finetuning.encoding import Document, Encoder
from lightning_automodel.finetuning.sources import Source

_FORMAT = 2  # raise when the meaning of the files changes


@dataclass(frozen=True)
class Part:
    """Documents of a store that come from one source.

    Attributes:
        source: file, or name of a data set.
        form: what the source was taken for.
        documents: how many there are.
    """

    source: str
    form: str
    documents: int


@dataclass(frozen=True)
class TokenStore:
    """Documents, one after the other.

    Attributes:
        directory: where the arrays lie.
        ids: int32 [tokens].
        trained: bool [tokens], the tokens that the loss counts.
        borders: int64 [documents + 1], where each document begins and the last one ends.
        parts: the sources, in the order of the documents.
    """

    directory: Path
    ids: np.ndarray
    trained: np.ndarray
    borders: np.ndarray
    parts: tuple[Part, ...] = ()

    def __len__(self) -> int:
        return len(self.borders) - 1

    def __reduce__(self) -> tuple[Callable[[Path], "TokenStore"], tuple[Path]]:
        # A memory map would be pickled with its contents, once per worker of a data loader.
        return TokenStore.load, (self.directory,)

    @staticmethod
    def load(directory: Path) -> "TokenStore":
        """Maps what :meth:`build` wrote."""
        ids, trained, borders = (
            np.load(directory / f"{name}.npy", mmap_mode="r") for name in ("ids", "trained", "borders")
        )
        parts = json.loads((directory / "parts.json").read_text("utf-8"))
        return TokenStore(directory, ids, trained, borders, tuple(Part(**part) for part in parts))

    def origin(self, position: int) -> dict[str, Any]:
        """Find the source of the document around a token, its number there from 1, and the token's number in it from 0.

        Args:
            position: in ``ids``.
        """
        document = int(np.searchsorted(self.borders, position, side="right")) - 1
        before = 0
        for part in self.parts:
            if document < before + part.documents:
                place = {"source": part.source, "document": document - before + 1}
                return {**place, "first_token": position - int(self.borders[document])}
            before += part.documents
        return {"document": document + 1, "first_token": position - int(self.borders[document])}

    @staticmethod
    def build(documents: Iterable[Document], directory: Path, parts: Sequence[Part] = ()) -> "TokenStore":
        """Writes ``documents`` to ``directory``, all of it or nothing. ``parts`` say where they come from."""
        directory.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=directory.name, dir=directory.parent))
        try:
            _write(documents, unfinished)
            (unfinished / "parts.json").write_text(json.dumps([asdict(part) for part in parts]), "utf-8")
            _publish(unfinished, directory)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        return TokenStore.load(directory)


def _write(documents: Iterable[Document], directory: Path) -> None:
    everything = list(documents)
    lengths = [len(document.ids) for document in everything]
    np.save(directory / "ids.npy", _join([document.ids for document in everything], np.int32))
    np.save(directory / "trained.npy", _join([document.trained for document in everything], np.bool_))
    np.save(directory / "borders.npy", np.cumsum([0, *lengths], dtype=np.int64))


def _join(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)


def _publish(unfinished: Path, directory: Path) -> None:
    try:
        os.replace(unfinished, directory)
    except OSError:
        # Another process finished the same store first; a full directory is never replaced.
        if not directory.is_dir():
            raise


def store_key(sources: Sequence[Source], encoder: Encoder, columns: Mapping[str, str] | None = None) -> str:
    """Hash ``sources`` (sizes and times), tokenizer and encoder to a name for what encoding them gives."""
    stamps = [source.stamp() for source in sources]
    switches = (encoder.mask_prompt, encoder.append_eos, encoder.chat_template, dict(columns or {}))
    description = json.dumps([_FORMAT, stamps, switches, _fingerprint(encoder.tokenizer)])
    return hashlib.sha256(description.encode()).hexdigest()[:32]


def _fingerprint(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    backend = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else tokenizer.name_or_path
    return [type(tokenizer).__name__, backend, str(tokenizer.chat_template), str(tokenizer.special_tokens_map)]
