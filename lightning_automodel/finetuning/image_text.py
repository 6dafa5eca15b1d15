"""Chats with images: the module and the data module for models that read both.

::

    {"messages": [{"role": "user", "content": [{"type": "image", "image": "cat.png"}, {"type": "text", "text": "?"}]},
                  {"role": "assistant", "content": "a cat"}]}
        -- processor: template, image tokens, pixels --> input_ids, labels (the assistant's words), pixel_values, ...
"""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForImageTextToText,
    AutoProcessor,
    PreTrainedConfig,
)

from lightning_automodel.distributed.logs import log
from lightning_automodel.finetuning.causal_lm import CausalLM
from lightning_automodel.finetuning.pretrained import loads
from lightning_automodel.finetuning.rows import IGNORED
from lightning_automodel.finetuning.sources import ChatRecord, Record, expand, read_records
from lightning_automodel.finetuning.splits import SplitDataModule
from lightning_automodel.finetuning.tokenizers import load_beside

Batch = dict[str, Tensor]


class ImageTextLM(CausalLM):
    """A :class:`CausalLM` of a model that reads images beside text, with the same arguments, loss and logs."""

    auto_class = AutoModelForImageTextToText
    tokenizer_file = "processor_config.json"
    known_configs = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def is_image_text(config: PreTrainedConfig, records: Iterable[Record] = ()) -> bool:
    """Tell whether a model is one for :class:`ImageTextLM`, and not for ``CausalLM``.

    Args:
        config: of the model.
        records: that it is to read; a model that both train (Gemma 3) is one for images where they show some.
    """
    reads, writes = (loads(kind.auto_class, kind.known_configs, config) for kind in (ImageTextLM, CausalLM))
    if not reads:
        return False
    return not writes or any(isinstance(record, ChatRecord) and images_of(record.messages) for record in records)


class ImageTextDataModule(SplitDataModule):
    """Batches of chats with images, made by the model's own processor.

    Records are ``{"messages": [...]}`` of files as :class:`TextDataModule` reads them. The content of a message is
    text, or a list of ``{"type": "text", "text": ...}`` and ``{"type": "image", "image": path}``; paths are relative to
    the file. There is loss on what the assistant wrote, and never on image tokens. Rows are as wide as the longest of
    their batch.

    Args:
        processor: name or directory; by default the ``tokenizer_name`` or ``model_name`` of the module that is trained.
        train_files: paths or globs.
        val_files: paths or globs.
        test_files: paths or globs.
        sequence_length: tokens of a row, at most, image tokens included; a longer record is an error.
        batch_size: rows per micro-batch and data rank.
        pad_to_multiple_of: rows are padded to a multiple of this many tokens.
        num_workers: processes that assemble batches.
        processor_kwargs: more arguments of the processor's ``from_pretrained``, such as the pixels of an image at most.

    Raises:
        ValueError: for sizes below 1; from ``setup``: for files that cannot be read, images that are not there; from a
            batch: for a record that is too long.
    """

    def __init__(
        self,
        processor: str | None = None,
        train_files: str | list[str] | None = None,
        val_files: str | list[str] | None = None,
        test_files: str | list[str] | None = None,
        sequence_length: int = 4096,
        batch_size: int = 1,
        pad_to_multiple_of: int = 1,
        num_workers: int = 0,
        processor_kwargs: dict[str, Any] | None = None,
    ) -> None:
        files = {"train": train_files, "val": val_files, "test": test_files}
        super().__init__(files, batch_size, pad_to_multiple_of, num_workers)
        self.processor, self.processor_kwargs = processor, processor_kwargs
        self.sequence_length = sequence_length
        self._loaded: Any = None

    @property
    def loaded_tokenizer(self) -> Any:
        """Return the processor, which exports hold beside the model; it is read on first use."""
        if self._loaded is None:
            module = getattr(self.trainer, "lightning_module", None)
            self._loaded = load_beside(AutoProcessor, "processor", self.processor, self.processor_kwargs, module)
        return self._loaded

    def _read(self, split: str, files: str | list[str]) -> "_Chats":
        chats = _Chats(files)
        images = sum(len(images_of(record.messages)) for record in chats.records)
        log(f"{split}: {files} as chats, {len(chats)} documents, {images} images -> {len(chats)} rows")
        return chats

    def _collator(self) -> "ChatCollator":
        return ChatCollator(self.loaded_tokenizer, self.sequence_length, self.pad_to_multiple_of)


class _Chats(Dataset[ChatRecord]):
    def __init__(self, files: str | list[str]) -> None:
        self.records: list[ChatRecord] = []
        for file in expand(files):
            for record in read_records([file]):
                if not isinstance(record, ChatRecord):
                    raise ValueError(f'{record.place}: chats with images are records {{"messages": [...]}}')
                self.records.append(ChatRecord(record.place, _located(record, file.parent), record.tools))

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> ChatRecord:
        return self.records[index]


def _located(record: ChatRecord, folder: Path) -> list[dict[str, Any]]:
    """Make paths of images whole.

    Raises:
        ValueError: naming the record, for an image that is not there.
    """
    messages = copy.deepcopy(record.messages)
    for part in _parts(messages):
        if part.get("type") == "image":
            path = folder / str(part.get("image", ""))
            if not path.is_file():
                raise ValueError(f"{record.place}: the image {part.get('image')!r} is not in {folder}")
            part["image"] = str(path)
    return messages


def _parts(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [part for message in messages if isinstance(message["content"], list) for part in message["content"]]


def images_of(messages: Sequence[dict[str, Any]]) -> list[str]:
    """List the paths of a conversation's images."""
    return [part["image"] for part in _parts(messages) if part.get("type") == "image"]


def process(processor: Any, conversations: list[list[dict[str, Any]]], multiple: int = 1, **template: Any) -> Batch:
    """Make a batch of conversations: what the processor returns for the text of its template, and for the images.

    Args:
        processor: of a model.
        conversations: messages; images are paths.
        multiple: rows are padded to a multiple of it.
        template: more arguments of ``apply_chat_template``.
    """
    from PIL import Image

    texts = [processor.apply_chat_template(c, tokenize=False, **template) for c in conversations]
    images = [[Image.open(path).convert("RGB") for path in images_of(c)] for c in conversations]
    found = processor(
        text=texts,
        images=images if any(images) else None,
        padding=True,
        pad_to_multiple_of=multiple,
        add_special_tokens=False,
        return_tensors="pt",
    )
    return dict(found)


@dataclass(frozen=True)
class ChatCollator:
    """Makes a batch of chats: what the processor returns, and ``labels`` int64 [batch, seq].

    Attributes:
        processor: of the model.
        length: tokens of a row, at most.
        multiple: rows are padded to a multiple of it.
    """

    processor: Any
    length: int
    multiple: int = 1

    def __call__(self, records: list[ChatRecord]) -> Batch:
        """Collates ``records``.

        Raises:
            ValueError: naming the record, if it is too long, or the template changes what came before.
        """
        batch = process(self.processor, [record.messages for record in records], self.multiple)
        labels = torch.full_like(batch["input_ids"], IGNORED)
        for row, record in enumerate(records):
            offset = int(batch["attention_mask"][row].argmax())  # padding may stand on the left
            width = int(batch["attention_mask"][row].sum())
            if width > self.length:
                raise ValueError(f"{record.place}: {width} tokens, more than sequence_length={self.length}")
            for begin, end in self._turns(record, batch["input_ids"][row, offset : offset + width]):
                labels[row, offset + begin : offset + end] = batch["input_ids"][row, offset + begin : offset + end]
        for token in self._image_tokens():
            labels[batch["input_ids"] == token] = IGNORED
        return {**batch, "labels": labels}

    def _turns(self, record: ChatRecord, ids: Tensor) -> list[tuple[int, int]]:
        """Find the tokens of the assistant's turns: what the template adds behind the header that asks for them."""
        whole, turns = self._words(record.messages), []
        for index, message in enumerate(record.messages):
            if message["role"] != "assistant":
                continue
            begin = self._length(record.messages, index, ids, whole, add_generation_prompt=True)
            end = self._length(record.messages, index + 1, ids, whole)
            if begin is None or end is None or begin > end:
                raise ValueError(
                    f"{record.place}: the chat template renders message {index} differently when others follow, so "
                    " the assistant's words cannot be found; end the record with its only assistant message"
                )
            turns.append((begin, end))
        return turns

    def _length(
        self, messages: list[dict[str, Any]], count: int, ids: Tensor, whole: list[int], **template: Any
    ) -> int | None:
        """Count how many of ``ids`` the first ``count`` messages are; ``None``: they are rendered differently alone.

        Only images make more tokens of what the template writes. Where none follows, the words that follow are counted.
        """
        first = messages[:count]
        if not images_of(messages[count:]):
            words = self._words(first, **template)
            rest = whole[len(words) :]
            if whole[: len(words)] == words and ids[len(ids) - len(rest) :].tolist() == rest:
                return len(ids) - len(rest)
        batch = process(self.processor, [first], self.multiple, **template)
        alone = batch["input_ids"][0, batch["attention_mask"][0].bool()]
        return len(alone) if torch.equal(ids[: len(alone)], alone) else None

    def _words(self, messages: list[dict[str, Any]], **template: Any) -> list[int]:
        """Return the tokens of what the template writes, with a mark for each image."""
        text = self.processor.apply_chat_template(messages, tokenize=False, **template)
        return list(self.processor.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _image_tokens(self) -> list[int]:
        names = ("image_token_id", "video_token_id", "boi_token_id", "eoi_token_id")
        found = (getattr(self.processor, name, None) for name in names)
        return [token for token in found if isinstance(token, int)]
