"""Preference pairs: what a batch holds, what is trained on, and what is refused, with its line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from lightning_automodel.finetuning import PreferenceDataModule

PAIRS = [
    {"prompt": "def main():", "chosen": " return 42", "rejected": " fox"},
    {"prompt": "The quick", "chosen": " brown fox jumps", "rejected": " dog"},
]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _data(folder: Path, model: Path, pairs: list[Any], **settings: Any) -> PreferenceDataModule:
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    data = PreferenceDataModule(str(model), str(folder / "pairs.jsonl"), val_files=str(folder / "*.jsonl"), **settings)
    data.setup("fit")
    return data


def test_chosen_rows_come_first_and_answers_alone_are_trained_on(model_dir: Path, tmp_path: Path) -> None:
    data = _data(tmp_path, model_dir, PAIRS, batch_size=2, pad_to_multiple_of=8)
    (batch,) = data.val_dataloader()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    assert batch["input_ids"].shape == batch["labels"].shape == batch["attention_mask"].shape
    assert len(batch["input_ids"]) == 4
    assert batch["input_ids"].shape[1] % 8 == 0
    answers = [tokenizer.decode(labels[labels >= 0]) for labels in batch["labels"]]
    assert answers == [f"{pair[key]}<eos>" for key in ("chosen", "rejected") for pair in PAIRS]
    rows = zip(batch["input_ids"], batch["attention_mask"], strict=True)
    texts = [tokenizer.decode(ids[mask.bool()]) for ids, mask in rows]
    assert texts == [f"{pair['prompt']}{pair[key]}<eos>" for key in ("chosen", "rejected") for pair in PAIRS]
    assert torch.equal(batch["input_ids"][batch["labels"] >= 0], batch["labels"][batch["labels"] >= 0])


def test_chats_take_the_template(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    chosen, rejected = ([{"role": "assistant", "content": text}] for text in ("brown", "lazy"))
    pair = {"question": [{"role": "user", "content": "fox?"}], "chosen": chosen, "rejected": rejected}
    settings = {"columns": {"prompt": "question"}, "chat_template": str(tmp_path / "chat.jinja")}
    (batch,) = _data(tmp_path, model_dir, [pair], **settings).val_dataloader()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    answers = [tokenizer.decode(labels[labels >= 0]) for labels in batch["labels"]]
    assert answers == ["brown<|im_end|>", "lazy<|im_end|>"]


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ({"prompt": "q", "chosen": "a"}, r"pairs.jsonl:2: no 'rejected' among the keys chosen, prompt"),
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, r"pairs.jsonl:2: 'chosen' and 'rejected' are the same"),
        ({"prompt": "q", "chosen": "a", "rejected": 3}, r"pairs.jsonl:2: 'rejected' is a int"),
        ({"prompt": "q", "chosen": "a " * 40, "rejected": "b"}, r"pairs.jsonl:2: \d+ tokens .* sequence_length=30"),
        (["q"], r"pairs.jsonl:2: a list; a record is an object: {\"prompt\""),
    ],
)
def test_what_is_no_pair_is_named(model_dir: Path, tmp_path: Path, pair: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _data(tmp_path, model_dir, [PAIRS[0], pair], sequence_length=30)


def test_plain_text_holds_no_pairs(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "pairs.txt").write_text("x")
    with pytest.raises(ValueError, match=r"pairs.txt is plain text"):
        PreferenceDataModule(str(model_dir), str(tmp_path / "pairs.txt")).setup("fit")
