"""Rows hold every token once, keep documents apart, and pad without a trace."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from lightning_automodel.finetuning.encoding import Document
from lightning_automodel.finetuning.rows import IGNORED, Collator, RowDataset, cut, pack
from lightning_automodel.finetuning.store import TokenStore


def _store(directory: Path, lengths: list[int], untrained: int = 0) -> TokenStore:
    """Documents of random ids; the first ``untrained`` tokens of each carry no loss."""
    rng = np.random.default_rng(0)
    documents = [Document(rng.integers(4, 300, n).astype(np.int32), np.arange(n) >= untrained) for n in lengths]
    return TokenStore.build(documents, directory / "store")


@given(st.lists(st.integers(1, 16), max_size=60))
def test_packing_holds_every_piece_once_and_fits(lengths: list[int]) -> None:
    rows = pack(lengths, 16)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in row) <= 16 for row in rows)
    # Best fit never opens a row for a piece that an open one would take: at most one row is at most half full.
    assert sum(sum(lengths[index] for index in row) <= 8 for row in rows) <= 1


def test_long_documents_are_split_or_truncated(tmp_path: Path) -> None:
    store = _store(tmp_path, [3, 10])
    assert cut(store, np.arange(2), 4, "split").tolist() == [[0, 3], [3, 7], [7, 11], [11, 13]]
    assert cut(store, np.arange(2), 4, "truncate").tolist() == [[0, 3], [3, 7]]


def test_pieces_without_a_target_are_left_out(tmp_path: Path) -> None:
    store = _store(tmp_path, [9, 1, 0, 5], untrained=4)
    assert cut(store, np.arange(4), 4, "split").tolist() == [[4, 8]]
    assert cut(store, np.arange(4), 5, "split").tolist() == [[0, 5], [5, 9], [10, 15]]


def test_padding_is_ignored_and_rounded(tmp_path: Path) -> None:
    store = _store(tmp_path, [3, 6])
    dataset = RowDataset(store, cut(store, np.arange(2), 8, "split"), [[0], [1]])
    batch = Collator(pad_token_id=2, multiple=4)([dataset[0], dataset[1]])
    assert set(batch) == {"input_ids", "labels", "attention_mask"}
    assert batch["attention_mask"].tolist() == [[1] * 3 + [0] * 5, [1] * 6 + [0] * 2]
    assert (batch["input_ids"][batch["attention_mask"] == 0] == 2).all()
    assert (batch["labels"] == IGNORED).sum() == 5 + 2 + 2  # padding, and the first token of each document


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_documents_do_not_see_each_other(tmp_path: Path, model_dir: Path, attention: str) -> None:
    store = _store(tmp_path, [5, 1, 7, 3, 12])
    pieces = cut(store, np.arange(5), 16, "split")
    rows = pack((pieces[:, 1] - pieces[:, 0]).tolist(), 16)
    dataset = RowDataset(store, pieces, rows)
    batch = Collator(pad_token_id=2, packed_width=16)([dataset[i] for i in range(len(rows))])
    assert set(batch) == {"input_ids", "labels", "position_ids"}
    model = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation=attention).eval()
    with torch.no_grad():
        packed = model(**batch, use_cache=False, num_items_in_batch=1)
        total = torch.zeros(())
        for logits, row in zip(packed.logits, rows, strict=True):
            start = 0
            for begin, end in pieces[row]:
                ids = torch.from_numpy(store.ids[begin:end].astype(np.int64))[None]
                alone = model(input_ids=ids, labels=ids, use_cache=False, num_items_in_batch=1)
                torch.testing.assert_close(logits[start : start + ids.numel()], alone.logits[0], rtol=0, atol=1e-5)
                total += alone.loss
                start += ids.numel()
    torch.testing.assert_close(packed.loss, total)
