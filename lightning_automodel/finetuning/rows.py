"""Lays documents out in rows of a bounded length, one per row or packed, and batches rows.

documents -> pieces of at most sequence_length tokens -> rows (one piece each, or packed) -> padded batches
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_automodel.finetuning.store import TokenStore

IGNORED = -100
LongDocuments = Literal["split", "truncate"]


def cut(store: TokenStore, documents: np.ndarray, length: int, long_documents: LongDocuments) -> np.ndarray:
    """Cut documents into pieces of at most ``length`` tokens, as positions in ``store.ids``.

    Long documents are split into pieces that know nothing of each other, or truncated. Pieces without a target (a token
    that is trained on and has a token before it) are left out.

    Args:
        documents: int [n], which documents, in order.

    Returns:
        int64 [pieces, 2], begin and end.
    """
    pieces: list[tuple[int, int]] = []
    for document in documents:
        begin, end = int(store.borders[document]), int(store.borders[document + 1])
        last = end if long_documents == "split" else min(end, begin + length)
        pieces += [(start, min(start + length, last)) for start in range(begin, last, length)]
    array = np.array(pieces, dtype=np.int64).reshape(-1, 2)
    counted = np.concatenate([[0], np.cumsum(store.trained)])
    targets = counted[array[:, 1]] - counted[np.minimum(array[:, 0] + 1, array[:, 1])]
    return array[targets > 0]


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack pieces into rows: longest first, each into the fullest row that still takes it (best-fit decreasing)."""
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # free tokens and row, sorted
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = bisect_left(open_rows, (lengths[index], -1))
        if place < len(open_rows):
            free, row = open_rows.pop(place)
        else:
            free, row = capacity, len(rows)
            rows.append([])
        rows[row].append(index)
        if free > lengths[index]:
            insort(open_rows, (free - lengths[index], row))
    return rows


class RowDataset(Dataset[dict[str, Tensor]]):
    """Rows of tokens, each a dict of int64 tensors [tokens]: ``input_ids``, ``labels``, ``position_ids``.

    The first token of a piece is nobody's target: nothing is predicted across the border of documents.
    """

    def __init__(self, store: TokenStore, pieces: np.ndarray, rows: list[list[int]]) -> None:
        self.store = store
        self.pieces = pieces
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        borders = [self.pieces[piece] for piece in self.rows[index]]
        return join([(self.store.ids[begin:end], self.store.trained[begin:end]) for begin, end in borders])

    def origin(self, index: int) -> dict[str, Any]:
        """Say where the first piece of a row comes from."""
        return self.store.origin(int(self.pieces[self.rows[index][0], 0]))


def join(pieces: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict[str, Tensor]:
    """Join pieces, each ``ids`` and ``trained`` [tokens], to a row; the first token of a piece is nobody's target."""
    row: dict[str, list[Tensor]] = {"input_ids": [], "labels": [], "position_ids": []}
    for values, trained in pieces:
        ids = torch.from_numpy(values.astype(np.int64))
        labels = ids.masked_fill(torch.from_numpy(~trained), IGNORED)
        labels[0] = IGNORED
        row["input_ids"].append(ids)
        row["labels"].append(labels)
        row["position_ids"].append(torch.arange(len(ids)))
    return {key: torch.cat(parts) for key, parts in row.items()}


@dataclass(frozen=True)
class Collator:
    """Pads rows to one width.

    Padded batches hold ``input_ids``, ``labels``, ``attention_mask`` and are as wide as their longest row; packed ones
    hold ``input_ids``, ``labels``, ``position_ids``, ``packed_width`` wide. All are int64 [batch, width]. Without
    an attention mask transformers keeps documents apart where positions restart, padding included.

    Attributes:
        pad_token_id: fills ``input_ids``.
        multiple: widths are rounded up to a multiple of it.
        packed_width: tokens of a packed row; ``None``: rows are padded.
    """

    pad_token_id: int
    multiple: int = 1
    packed_width: int | None = None

    def __call__(self, rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Collates one batch of the rows of :class:`RowDataset`."""
        width = self.packed_width or max(len(row["input_ids"]) for row in rows)
        width = -(-width // self.multiple) * self.multiple
        batch = {
            "input_ids": torch.stack([_pad(row["input_ids"], width, self.pad_token_id) for row in rows]),
            "labels": torch.stack([_pad(row["labels"], width, IGNORED) for row in rows]),
        }
        if self.packed_width:
            batch["position_ids"] = torch.stack([_continue_positions(row["position_ids"], width) for row in rows])
        else:
            batch["attention_mask"] = torch.stack([_pad(torch.ones_like(row["labels"]), width, 0) for row in rows])
        return batch


def _pad(values: Tensor, width: int, value: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, width - len(values)), value=value)


def _continue_positions(positions: Tensor, width: int) -> Tensor:
    return torch.cat([positions, torch.arange(width - len(positions))])
