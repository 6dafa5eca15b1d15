"""Turns records into token ids and a mask of the tokens that are trained on."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import numpy as np
from transformers import PreTrainedTokenizerBase

from lightning_automodel.finetuning.chat import Span, render_chat
from lightning_automodel.finetuning.sources import ChatRecord, PromptRecord, Record, TextRecord

_CHUNK = 512  # records that the tokenizer's threads get at once
_T = TypeVar("_T")


@dataclass(frozen=True)
class Document:
    """One document: ``ids`` int32 [tokens]; ``trained`` bool [tokens], the tokens that the loss counts."""

    ids: np.ndarray
    trained: np.ndarray


@dataclass(frozen=True)
class Encoder:
    """How records become tokens.

    Attributes:
        tokenizer: a fast tokenizer.
        mask_prompt: the prompt of a prompt/completion record carries no loss. Of a chat only the assistant's turns do.
        append_eos: text and completions end with the tokenizer's end-of-sequence token. Chat templates write their own.
        chat_template: text of a template that replaces the tokenizer's.
    """

    tokenizer: PreTrainedTokenizerBase
    mask_prompt: bool = True
    append_eos: bool = True
    chat_template: str | None = None

    def encode(self, records: Iterable[Record]) -> Iterator[Document]:
        """Encode documents in the order of ``records``.

        Raises:
            ValueError: if the tokenizer is not a fast one, or a record's chat cannot be rendered.
        """
        if not self.tokenizer.is_fast:
            raise ValueError(
                f"tokenizer {self.tokenizer.name_or_path!r} ({type(self.tokenizer).__name__}) is not a fast one, so "
                "prompts cannot be told from answers; save it with a tokenizer.json"
            )
        for chunk in _chunks(records, _CHUNK):
            chats = [record for record in chunk if isinstance(record, ChatRecord)]
            others = [record for record in chunk if not isinstance(record, ChatRecord)]
            documents = dict(zip(map(id, others), self._encode_texts(others), strict=True))
            documents |= zip(map(id, chats), self._encode_chats(chats), strict=True)
            yield from (documents[id(record)] for record in chunk)

    def _encode_texts(self, records: list[TextRecord | PromptRecord]) -> list[Document]:
        texts = [r.text if isinstance(r, TextRecord) else r.prompt + r.completion for r in records]
        documents = self._tokenize(texts, [self._span(record) for record in records], add_special_tokens=True)
        return [self._end(document) for document in documents]

    def _encode_chats(self, records: list[ChatRecord]) -> list[Document]:
        rendered = [render_chat(record, self.tokenizer, self.chat_template) for record in records]
        return self._tokenize(
            [text for text, _ in rendered], [spans for _, spans in rendered], add_special_tokens=False
        )

    def _span(self, record: TextRecord | PromptRecord) -> list[Span]:
        if isinstance(record, TextRecord):
            return [(0, len(record.text))]
        return [(len(record.prompt) if self.mask_prompt else 0, len(record.prompt) + len(record.completion))]

    def _tokenize(self, texts: list[str], spans: list[list[Span]], *, add_special_tokens: bool) -> list[Document]:
        if not texts:
            return []
        encoded = self.tokenizer(
            texts,
            add_special_tokens=add_special_tokens,
            return_offsets_mapping=True,
            return_attention_mask=False,
            verbose=False,
        )
        return [
            Document(np.asarray(ids, dtype=np.int32), _overlaps(np.asarray(offsets).reshape(-1, 2), wanted))
            for ids, offsets, wanted in zip(encoded["input_ids"], encoded["offset_mapping"], spans, strict=True)
        ]

    def _end(self, document: Document) -> Document:
        eos = self.tokenizer.eos_token_id
        if not self.append_eos or eos is None or len(document.ids) == 0:
            return document
        if document.ids[-1] == eos:
            document.trained[-1] = True
            return document
        return Document(np.append(document.ids, np.int32(eos)), np.append(document.trained, True))


def _overlaps(offsets: np.ndarray, spans: list[Span]) -> np.ndarray:
    """Finds the tokens that hold a character of a span. A token over the border of prompt and answer counts as answer.

    Args:
        offsets: int [tokens, 2], first and last + 1 character; special tokens that the tokenizer adds have none.
    """
    trained = np.zeros(len(offsets), dtype=bool)
    for start, stop in spans:
        trained |= (offsets[:, 0] < stop) & (offsets[:, 1] > start)
    return trained


def _chunks(items: Iterable[_T], size: int) -> Iterator[list[_T]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk
