"""The data module: text, prompt/completion and chat files to padded or packed batches."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import lightning as L
import numpy as np
import torch
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from lightning_automodel.distributed.logs import log
from lightning_automodel.finetuning.chat import read_template
from lightning_automodel.finetuning.encoding import Document, Encoder
from lightning_automodel.finetuning.loader import EpochShuffle, ResumableLoader
from lightning_automodel.finetuning.mixture import Files, repeat, sources_of, weights_of
from lightning_automodel.finetuning.report import describe_rows, describe_stream
from lightning_automodel.finetuning.rows import Collator, LongDocuments, RowDataset, cut, pack
from lightning_automodel.finetuning.store import Part, TokenStore, store_key
from lightning_automodel.finetuning.streams import RowStream
from lightning_automodel.finetuning.tokenizers import load_beside, padding_of

Split = Literal["train", "val", "test", "predict"]
_SPLITS: dict[str | None, tuple[Split, ...]] = {
    "fit": ("train", "val"),
    "validate": ("val",),
    "test": ("test",),
    "predict": ("predict",),
    None: ("train", "val", "test", "predict"),
}


class TextDataModule(L.LightningDataModule):
    """Batches for causal language models from files.

    A record is ``{"text": ...}``, ``{"prompt": ..., "completion": ...}`` or ``{"messages": [...]}`` (with the chat
    template; ``tools`` may stand beside). Records are the lines of a ``.jsonl`` file, the elements of the array in a
    ``.json`` file, the rows of ``.csv``, ``.tsv`` and ``.parquet``, and those of data sets: a directory that
    ``save_to_disk`` wrote, or ``hf:owner/name``, perhaps with ``?config=...&split=...``. Any other file is one document
    of plain text. All but Parquet may be compressed (``.gz``, ``.bz2``, ``.xz``, ``.zst``). Labels are -100 where there
    is no loss: on prompts, on what the assistant did not write, on padding.

    Tokens are cached on disk: one process per node tokenizes, the others map its files.

    Args:
        tokenizer: name or directory; by default the ``tokenizer_name`` or ``model_name`` of the module that is trained.
        train_files: paths or globs, or names of data sets; for a mixture a dict of them to weights, which say how many
            times their documents come in an epoch: 1 once, 0.5 a half of them, chosen by ``split_seed``.
        val_files: paths or globs; or see ``val_fraction``.
        test_files: paths or globs.
        predict_files: paths or globs.
        val_fraction: share of the training documents that is held out for validation instead of ``val_files``. Which
            ones depends on the files and ``split_seed`` only.
        split_seed: seed of that choice.
        sequence_length: tokens per row, at most.
        batch_size: rows per micro-batch and data rank.
        packing: several documents per row, each with its own positions and no attention between them. Needs a model
            whose mask follows ``position_ids`` (attention models with sdpa, eager or flash attention; not state-space
            models). Prediction never packs.
        long_documents: what happens to documents longer than a row: "split" into pieces that do not see each other, or
            "truncate".
        pad_to_multiple_of: rows are padded to a multiple of this many tokens.
        mask_prompt: no loss on the prompt of prompt/completion records.
        append_eos: ends text and completions with the end-of-sequence token, if the tokenizer has one.
        chat_template: file with a chat template that replaces the tokenizer's.
        num_workers: processes that assemble batches.
        columns: what the keys of a record are called in the files: ``{"prompt": "question", "completion": "answer"}``.
        streaming: training documents are read and tokenized as they are needed, all by each process, and not kept. They
            are shuffled (and packed) among some thousands at a time. ``max_steps`` then bounds the schedule.
        cache_dir: where tokens are cached; by default ``$XDG_CACHE_HOME/lightning_automodel`` (``~/.cache/...``).
        tokenizer_kwargs: more arguments of the tokenizer's ``from_pretrained``: ``add_bos_token``,
            ``trust_remote_code``... The latter, and where to look, are those of the module's ``model_kwargs`` where the
            tokenizer is that of its model.

    Raises:
        ValueError: for a size that cannot be; from ``setup``: for files that are missing or cannot be read (with the
            line), on every rank.
    """

    def __init__(
        self,
        tokenizer: str | None = None,
        train_files: Files | None = None,
        val_files: Files | None = None,
        test_files: Files | None = None,
        predict_files: Files | None = None,
        val_fraction: float = 0.0,
        split_seed: int = 0,
        sequence_length: int = 1024,
        batch_size: int = 1,
        packing: bool = False,
        long_documents: LongDocuments = "split",
        pad_to_multiple_of: int = 1,
        mask_prompt: bool = True,
        append_eos: bool = True,
        chat_template: str | None = None,
        num_workers: int = 0,
        columns: dict[str, str] | None = None,
        streaming: bool = False,
        cache_dir: str | None = None,
        tokenizer_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.tokenizer, self.tokenizer_kwargs = tokenizer, tokenizer_kwargs
        files = (train_files, val_files, test_files, predict_files)
        self.files: dict[Split, Files | None] = dict(zip(_SPLITS[None], files, strict=True))
        self.val_fraction = val_fraction
        self.split_seed = split_seed
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.packing = packing
        self.long_documents: LongDocuments = long_documents
        self.pad_to_multiple_of = pad_to_multiple_of
        self.mask_prompt = mask_prompt
        self.append_eos = append_eos
        self.chat_template = read_template(chat_template)
        self.num_workers = num_workers
        self.columns = columns or {}
        self.streaming = streaming
        self.cache_dir = Path(cache_dir) if cache_dir else default_cache_dir()
        self.datasets: dict[Split, RowDataset] = {}
        self.largest_token = -1
        self._encoder: Encoder | None = None
        self._check()

    def prepare_data(self) -> None:
        """Tokenizes all files once per node."""
        try:
            for split, files in self.files.items():
                if files is not None and not self._streams(split):
                    self._store(files)
        except ValueError:
            pass  # This runs on one rank while the others wait; in setup every rank meets the same error.

    def setup(self, stage: str | None = None) -> None:
        """Lays out the rows of the splits that ``stage`` needs."""
        if stage == "fit" and self.files["train"] is None:
            raise ValueError(
                "TextDataModule(train_files=None) cannot fit; give train_files, for example 'data/*.jsonl'"
            )
        for split in _SPLITS[stage]:
            if split not in self.datasets and self._has(split) and not self._streams(split):
                self.datasets[split] = self._rows(split)

    def train_dataloader(self) -> DataLoader:
        """Load rows in an order of seed and epoch alone; Lightning's sampler splits them among data ranks."""
        if self.streaming:
            return self._stream_loader()
        return self._loader("train", shuffle=True)

    def val_dataloader(self) -> Any:
        """Load rows in order; no loader when nothing is held out."""
        return self._loader("val") if self._has("val") else []

    def test_dataloader(self) -> DataLoader:
        """Load rows in order."""
        return self._loader("test")

    def predict_dataloader(self) -> DataLoader:
        """Load rows in order, one document or chunk of one each."""
        return self._loader("predict")

    def origin_of_prediction(self, index: int) -> dict[str, Any]:
        """Say where row ``index`` of the prediction begins: its source, document there and token of that."""
        return self.datasets["predict"].origin(index)

    @property
    def loaded_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer, which is read on first use."""
        return self._get_encoder().tokenizer

    def _check(self) -> None:
        if self.sequence_length < 2:
            raise ValueError(
                f"sequence_length={self.sequence_length}: a row needs 2 tokens, one to read and one to predict"
            )
        for name in ("batch_size", "pad_to_multiple_of"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not 0 <= self.val_fraction < 1:
            raise ValueError(f"val_fraction={self.val_fraction} must be at least 0 and less than 1")
        if self.val_fraction and self.files["val"] is not None:
            raise ValueError(f"val_fraction={self.val_fraction} and val_files={self.files['val']!r}: give one of them")

        if self.streaming and (self.val_fraction or isinstance(self.files["train"], dict) or self.num_workers > 1):
            raise ValueError(
                f"streaming=True, val_fraction={self.val_fraction}, num_workers={self.num_workers}: one stream, "
                "in one worker at most; give val_files in place of val_fraction, a list of files in place of "
                "weights, and num_workers 0 or 1"
            )

    def _streams(self, split: Split) -> bool:
        return self.streaming and split == "train"

    def _has(self, split: Split) -> bool:
        from_train = split == "val" and self.val_fraction > 0 and self.files["train"] is not None
        return self.files[split] is not None or from_train

    def _loader(self, split: Split, shuffle: bool = False) -> DataLoader:
        if split not in self.datasets:
            raise ValueError(f"TextDataModule({split}_files=None) has no {split} data; give {split}_files")
        dataset = self.datasets[split]
        return ResumableLoader(
            dataset, sampler=EpochShuffle(dataset) if shuffle else None, **self._of_loader(packing=self._packs(split))
        )

    def _stream_loader(self) -> DataLoader:
        files = self.files["train"]
        assert files is not None
        sources = sources_of(files)
        log(describe_stream("train", sources, self.sequence_length, packing=self.packing))
        stream = RowStream(
            sources,
            self._get_encoder(),
            self.columns,
            self.sequence_length,
            self.long_documents,
            packing=self.packing,
            seed=int(os.environ.get("PL_GLOBAL_SEED", 0)),
        )
        return DataLoader(stream, **self._of_loader(packing=self.packing))

    def _of_loader(self, *, packing: bool) -> dict[str, Any]:
        pad = padding_of(self.loaded_tokenizer)
        return {
            "batch_size": self.batch_size,
            "collate_fn": Collator(pad, self.pad_to_multiple_of, self.sequence_length if packing else None),
            "num_workers": self.num_workers,
            "persistent_workers": self.num_workers > 0,
            "pin_memory": torch.cuda.is_available(),
        }

    def _packs(self, split: Split) -> bool:
        return self.packing and split != "predict"

    def _rows(self, split: Split) -> RowDataset:
        held_out = split == "val" and self.files["val"] is None
        files = self.files["train" if held_out else split]
        assert files is not None
        store = self._store(files)
        documents = self._documents(split, store)
        pieces = cut(store, documents, self.sequence_length, self.long_documents)
        if len(pieces) == 0:
            raise ValueError(
                f"{split} data from {files!r} is empty: none of {len(store)} documents has a token to predict within "
                f"sequence_length={self.sequence_length}"
            )
        lengths = (pieces[:, 1] - pieces[:, 0]).tolist()
        rows = pack(lengths, self.sequence_length) if self._packs(split) else [[i] for i in range(len(pieces))]
        self.largest_token = max(self.largest_token, int(store.ids.max()))
        dataset = RowDataset(store, pieces, rows)
        log(describe_rows(split, dataset, self.sequence_length, len(documents)))
        return dataset

    def _documents(self, split: Split, store: TokenStore) -> np.ndarray:
        kept = self._share(split, store)
        files = self.files[split]
        if not isinstance(files, dict):
            return kept
        by_source = weights_of(files)
        weights = np.repeat([by_source[part.source] for part in store.parts], [part.documents for part in store.parts])
        return repeat(kept, weights[kept], self.split_seed)

    def _share(self, split: Split, store: TokenStore) -> np.ndarray:
        everything = np.arange(len(store))
        if not self.val_fraction or split not in ("train", "val"):
            return everything
        held_out = max(1, round(len(store) * self.val_fraction))
        if held_out >= len(store):
            raise ValueError(
                f"val_fraction={self.val_fraction} of {len(store)} documents leaves none to train on; documents are "
                "never cut for this, so give val_files instead"
            )
        shuffled = np.random.default_rng(self.split_seed).permutation(len(store))
        return np.sort(shuffled[:held_out] if split == "val" else shuffled[held_out:])

    def _store(self, files: Files) -> TokenStore:
        sources = sources_of(files)
        encoder = self._get_encoder()
        directory = self.cache_dir / store_key(sources, encoder, self.columns)
        if directory.is_dir():
            return TokenStore.load(directory)
        documents: list[Document] = []
        parts: list[Part] = []
        for source in sources:
            found = list(encoder.encode(source.read(self.columns)))
            documents += found
            parts.append(Part(source.name, source.form, len(found)))
        if not any(len(document.ids) for document in documents):
            raise ValueError(f"{files!r} holds no text: {len(sources)} files, {len(documents)} documents, 0 tokens")
        return TokenStore.build(documents, directory, parts)

    def _get_encoder(self) -> Encoder:
        if self._encoder is None:
            module = getattr(self.trainer, "lightning_module", None)
            tokenizer = load_beside(AutoTokenizer, "tokenizer", self.tokenizer, self.tokenizer_kwargs, module)
            self._encoder = Encoder(tokenizer, self.mask_prompt, self.append_eos, self.chat_template)
        return self._encoder


def default_cache_dir() -> Path:
    """Return ``$XDG_CACHE_HOME/lightning_automodel``, by default below ``~/.cache``."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "lightning_automodel"


def token_rows(loader: Iterable[dict[str, torch.Tensor]]) -> list[dict[str, list[int]]]:
    """Returns the rows of a data loader as plain lists, one dict per row, for tools that know nothing of this
    package.
    """
    rows: list[dict[str, list[int]]] = []
    for batch in loader:
        values = {key: value.tolist() for key, value in batch.items()}
        rows += [{key: values[key][i] for key in values} for i in range(len(batch["labels"]))]
    return rows
