"""Tokenized documents in memory-mapped files: tokenized once per node, shared by its processes."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from lightning_automodel.finetuning.encoding import Document, Encoder

_FORMAT = 1  # raise when the meaning of the files changes


@dataclass(frozen=True)
class TokenStore:
    """Documents, one after the other.

    Attributes:
        directory: where the arrays lie.
        ids: int32 [tokens].
        trained: bool [tokens], the tokens that the loss counts.
        borders: int64 [documents + 1], where each document begins and the last one ends.
    """

    directory: Path
    ids: np.ndarray
    trained: np.ndarray
    borders: np.ndarray

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
        return TokenStore(directory, ids, trained, borders)

    @staticmethod
    def build(documents: Iterable[Document], directory: Path) -> "TokenStore":
        """Writes ``documents`` to ``directory``, all of it or nothing."""
        directory.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=directory.name, dir=directory.parent))
        try:
            _write(documents, unfinished)
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


def store_key(files: Sequence[Path], encoder: Encoder) -> str:
    """Hash ``files`` (sizes and times), tokenizer and encoder to a name for what encoding them gives."""
    stats = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    switches = (encoder.mask_prompt, encoder.append_eos, encoder.chat_template)
    description = json.dumps([_FORMAT, stats, switches, _fingerprint(encoder.tokenizer)])
    return hashlib.sha256(description.encode()).hexdigest()[:32]


def _fingerprint(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    backend = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else tokenizer.name_or_path
    return [type(tokenizer).__name__, backend, str(tokenizer.chat_template), str(tokenizer.special_tokens_map)]
