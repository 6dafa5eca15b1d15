"""Rows from documents that are read as they are needed: nothing is kept, and nothing is known of what comes.

documents -> pieces of at most sequence_length tokens -> a window of them, packed and shuffled -> rows
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from torch import Tensor
from torch.utils.data import IterableDataset

from lightning_automodel.finetuning.encoding import Document, Encoder
from lightning_automodel.finetuning.rows import LongDocuments, join, pack
from lightning_automodel.finetuning.sources import Source

WINDOW = 4096  # pieces
Piece = tuple[np.ndarray, np.ndarray]  # ids and trained, each [tokens]


class RowStream(IterableDataset[dict[str, Tensor]]):
    """Rows as those of :class:`~lightning_automodel.finetuning.rows.RowDataset`, the same on every process.

    Args:
        sources: read one after the other.
        encoder: of their records.
        columns: from the keys of a record to those of the sources.
        length: tokens of a row, at most.
        long_documents: "split" or "truncate".
        packing: several pieces per row.
        seed: of the order within a window.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        encoder: Encoder,
        columns: Mapping[str, str],
        length: int,
        long_documents: LongDocuments,
        *,
        packing: bool,
        seed: int,
    ) -> None:
        self.sources = sources
        self.encoder = encoder
        self.columns = columns
        self.length = length
        self.long_documents = long_documents
        self.packing = packing
        self.seed = seed

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        generator = np.random.default_rng(self.seed)
        window: list[Piece] = []
        for piece in self._pieces():
            window.append(piece)
            if len(window) == WINDOW:
                yield from self._rows(window, generator)
                window = []
        yield from self._rows(window, generator)

    def _pieces(self) -> Iterator[Piece]:
        for source in self.sources:
            for document in self.encoder.encode(source.read(self.columns, streaming=True)):
                yield from self._cut(document)

    def _cut(self, document: Document) -> Iterator[Piece]:
        last = len(document.ids) if self.long_documents == "split" else self.length
        for begin in range(0, min(last, len(document.ids)), self.length):
            end = min(begin + self.length, last)
            if document.trained[begin + 1 : end].any():
                yield document.ids[begin:end], document.trained[begin:end]

    def _rows(self, window: list[Piece], generator: np.random.Generator) -> Iterator[dict[str, Tensor]]:
        lengths = [len(ids) for ids, _ in window]
        rows = pack(lengths, self.length) if self.packing else [[i] for i in range(len(window))]
        for row in generator.permutation(len(rows)):
            yield join([window[i] for i in rows[row]])
