"""Preference pairs: a prompt with a better and a worse answer, for DPO, reward models and what is like them.

::

    {"prompt": "3 + 4 =", "chosen": " 7", "rejected": " 8"}    a batch of two such records:

        row 0, 1    prompt and chosen      of record 0, 1
        row 2, 3    prompt and rejected    of record 0, 1      one forward pass sees both answers
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from lightning_automodel.distributed.logs import log
from lightning_automodel.finetuning.chat import read_template
from lightning_automodel.finetuning.encoding import Document, Encoder
from lightning_automodel.finetuning.rows import Collator, join
from lightning_automodel.finetuning.sources import PairRecord, Source, find_sources, make_pair
from lightning_automodel.finetuning.splits import SplitDataModule
from lightning_automodel.finetuning.tokenizers import load_beside, padding_of

Pair = tuple[dict[str, Tensor], dict[str, Tensor]]


class PreferenceDataModule(SplitDataModule):
    """Batches of preference pairs from files that :class:`TextDataModule` reads, too.

    Records are ``{"prompt": ..., "chosen": ..., "rejected": ...}``: all strings, or all lists of messages, for the chat
    template of the tokenizer. A batch holds ``input_ids``, ``labels`` and ``attention_mask``, int64 [2 * batch_size,
    width]: the chosen answers, then the rejected ones, padded to the longest. Labels are -100 on prompts (of chats: on
    what the assistant did not write) and on padding. Its two halves are ``tensor.chunk(2)``.

    Args:
        tokenizer: name or directory; by default the ``tokenizer_name`` or ``model_name`` of the module that is trained.
        train_files: paths or globs, or names of data sets.
        val_files: paths or globs.
        test_files: paths or globs.
        sequence_length: tokens of a row, at most; a longer answer is an error.
        batch_size: pairs per micro-batch and data rank.
        pad_to_multiple_of: rows are padded to a multiple of this many tokens.
        columns: from the keys of a record to those of the files: ``{"prompt": "question"}``.
        chat_template: a file that replaces the tokenizer's template.
        append_eos: answers that are strings end with the end-of-sequence token.
        num_workers: processes that assemble batches.
        tokenizer_kwargs: more arguments of the tokenizer's ``from_pretrained``.

    Raises:
        ValueError: for sizes below 1; from ``setup``: naming file and line, for what is no pair, two equal answers, or
            one that is too long.
    """

    def __init__(
        self,
        tokenizer: str | None = None,
        train_files: str | list[str] | None = None,
        val_files: str | list[str] | None = None,
        test_files: str | list[str] | None = None,
        sequence_length: int = 1024,
        batch_size: int = 1,
        pad_to_multiple_of: int = 1,
        columns: dict[str, str] | None = None,
        chat_template: str | None = None,
        append_eos: bool = True,
        num_workers: int = 0,
        tokenizer_kwargs: dict[str, Any] | None = None,
    ) -> None:
        files = {"train": train_files, "val": val_files, "test": test_files}
        super().__init__(files, batch_size, pad_to_multiple_of, num_workers)
        self.tokenizer, self.tokenizer_kwargs = tokenizer, tokenizer_kwargs
        self.sequence_length = sequence_length
        self.columns = columns or {}
        self.chat_template = read_template(chat_template)
        self.append_eos = append_eos
        self._loaded: PreTrainedTokenizerBase | None = None

    @property
    def loaded_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer, which is read on first use."""
        if self._loaded is None:
            module = getattr(self.trainer, "lightning_module", None)
            self._loaded = load_beside(AutoTokenizer, "tokenizer", self.tokenizer, self.tokenizer_kwargs, module)
        return self._loaded

    @property
    def pad_token_id(self) -> int:
        """Return the id that fills rows: the tokenizer's, or that of its end of a sequence."""
        return padding_of(self.loaded_tokenizer)

    @property
    def largest_token(self) -> int:
        """Return the largest id that was read, or -1."""
        return max((pairs.largest_token for pairs in self.datasets.values()), default=-1)

    def _read(self, split: str, files: str | list[str]) -> "PairDataset":
        encoder = Encoder(self.loaded_tokenizer, append_eos=self.append_eos, chat_template=self.chat_template)
        pairs = PairDataset(find_sources(files), encoder, self.columns, self.sequence_length)
        log(f"{split}: {files} -> {len(pairs):,} preference pairs, {pairs.tokens:,} tokens")
        return pairs

    def _collator(self) -> "PairCollator":
        return PairCollator(Collator(self.pad_token_id, self.pad_to_multiple_of))


class PairDataset(Dataset[Pair]):
    """Pairs of rows, each a dict of int64 tensors [tokens]: ``input_ids``, ``labels``, ``position_ids``."""

    def __init__(
        self, sources: Sequence[Source], encoder: Encoder, columns: dict[str, str], sequence_length: int
    ) -> None:
        values = (value for source in sources for value in source.values(streaming=False))
        pairs = [make_pair(place, value, columns) for place, value in values]
        chosen = list(encoder.encode(pair.chosen for pair in pairs))
        rejected = list(encoder.encode(pair.rejected for pair in pairs))
        self.pairs = list(zip(chosen, rejected, strict=True))
        for record, answers in zip(pairs, self.pairs, strict=True):
            _check_pair(record, answers, sequence_length)
        documents = [*chosen, *rejected]
        self.tokens = sum(len(document.ids) for document in documents)
        self.largest_token = max((int(document.ids.max()) for document in documents), default=-1)

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Pair:
        chosen, rejected = (join([(document.ids, document.trained)]) for document in self.pairs[index])
        return chosen, rejected


def _check_pair(record: PairRecord, documents: tuple[Document, Document], sequence_length: int) -> None:
    longest = max(len(document.ids) for document in documents)
    if longest > sequence_length:
        raise ValueError(
            f"{record.place}: {longest} tokens with its longer answer, more than sequence_length={sequence_length}; "
            "raise that, or leave the record out"
        )
    if not all(document.trained[1:].any() for document in documents):
        raise ValueError(f"{record.place}: an answer without a token, of which nothing can be learned")


@dataclass(frozen=True)
class PairCollator:
    """Makes a batch of pairs, int64 [2 * pairs, width]: all chosen rows, then all rejected rows."""

    collate: Collator

    def __call__(self, pairs: Sequence[Pair]) -> dict[str, Tensor]:
        """Collates ``pairs``."""
        return self.collate([chosen for chosen, _ in pairs] + [rejected for _, rejected in pairs])
