"""Says what the files of a split were taken for, and how well its rows are filled."""

from collections.abc import Iterator, Sequence

import numpy as np

from lightning_automodel.finetuning.rows import RowDataset
from lightning_automodel.finetuning.sources import Source
from lightning_automodel.finetuning.store import TokenStore

_MOST_NAMED = 5  # sources; more are counted by their form


def describe_rows(split: str, dataset: RowDataset, length: int, documents: int) -> str:
    """Describe a split in one line.

    Args:
        split: its name.
        dataset: its rows.
        length: tokens of a full row.
        documents: how many of the store's it has.
    """
    store = dataset.store
    tokens = int((dataset.pieces[:, 1] - dataset.pieces[:, 0]).sum())
    filled = 100 * tokens / (len(dataset) * length)
    rows = f"{_count(len(dataset), 'row')} of at most {length} tokens"
    read = "; ".join(_parts(store))
    return f"{split}: {read} -> {_count(documents, 'document')}, {rows}, {tokens:,} tokens, rows {filled:.1f} % filled"


def describe_stream(split: str, sources: Sequence[Source], length: int, *, packing: bool) -> str:
    """Describe in one line a split that is read as it is needed, of which nothing is counted."""
    forms = [source.form for source in sources]
    if len(sources) <= _MOST_NAMED:
        read = "; ".join(f"{source.name} as {source.form}" for source in sources)
    else:
        read = "; ".join(f"{_count(forms.count(form), 'file')} as {form}" for form in dict.fromkeys(forms))
    rows = f"{'packed rows' if packing else 'rows'} of at most {length} tokens"
    return f"{split}: {read} -> a stream of {rows}, whose end is not known"


def _parts(store: TokenStore) -> Iterator[str]:
    ends = np.cumsum([part.documents for part in store.parts], dtype=np.int64)
    begins = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    tokens = [int(store.borders[end] - store.borders[begin]) for begin, end in zip(begins, ends, strict=True)]
    if len(store.parts) <= _MOST_NAMED:
        for part, count in zip(store.parts, tokens, strict=True):
            yield f"{part.source} as {part.form}, {_size(part.documents, count)}"
        return
    for form in dict.fromkeys(part.form for part in store.parts):
        chosen = [i for i, part in enumerate(store.parts) if part.form == form]
        documents = sum(store.parts[i].documents for i in chosen)
        yield f"{_count(len(chosen), 'file')} as {form}, {_size(documents, sum(tokens[i] for i in chosen))}"


def _size(documents: int, tokens: int) -> str:
    return f"{_count(documents, 'document')}, {tokens:,} tokens"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
