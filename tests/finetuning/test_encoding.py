"""Which tokens carry loss: completions, the assistant's turns, ends of documents."""

import pytest
from transformers import PreTrainedTokenizerBase

from lightning_automodel.finetuning.encoding import Document, Encoder
from lightning_automodel.finetuning.sources import ChatRecord, PromptRecord, Record, TextRecord

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}\n{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
)
REWRITING = PLAIN.replace("{{ m.content }}", "{{ m.content if loop.last else m.content | upper }}")
MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "four"},
    {"role": "user", "content": "three?"},
    {"role": "assistant", "content": "nine"},
]


def _encode(tokenizer: PreTrainedTokenizerBase, record: Record, **switches: object) -> Document:
    (document,) = Encoder(tokenizer, **switches).encode([record])  # type: ignore[arg-type]
    return document


def _trained_text(tokenizer: PreTrainedTokenizerBase, document: Document) -> str:
    return tokenizer.decode(document.ids[document.trained])


def test_text_is_trained_on_as_a_whole_and_ends(tokenizer: PreTrainedTokenizerBase) -> None:
    document = _encode(tokenizer, TextRecord("f", "the fox"))
    assert document.trained.all()
    assert tokenizer.decode(document.ids) == "the fox<eos>"
    assert tokenizer.decode(_encode(tokenizer, TextRecord("f", "the fox"), append_eos=False).ids) == "the fox"


def test_the_prompt_carries_no_loss(tokenizer: PreTrainedTokenizerBase) -> None:
    record = PromptRecord("f:1", "The quick brown", " fox jumps")
    document = _encode(tokenizer, record)
    assert tokenizer.decode(document.ids) == "The quick brown fox jumps<eos>"
    assert _trained_text(tokenizer, document) == " fox jumps<eos>"
    assert _encode(tokenizer, record, mask_prompt=False).trained.all()


@pytest.mark.parametrize(("template", "end"), [(PLAIN, "<|im_end|>\n"), (MARKED, "<|im_end|>")])
def test_only_the_assistant_is_trained_on(tokenizer: PreTrainedTokenizerBase, template: str, end: str) -> None:
    document = _encode(tokenizer, ChatRecord("f:1", MESSAGES), chat_template=template)
    rendered = tokenizer.apply_chat_template(MESSAGES, chat_template=template, return_dict=False)
    assert document.ids.tolist() == rendered
    assert _trained_text(tokenizer, document) == f"four{end}nine{end}"


def test_a_template_that_rewrites_earlier_turns_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ValueError, match=r"data.jsonl:3: .*renders message 2 differently.*\{% generation %\}"):
        _encode(tokenizer, ChatRecord("data.jsonl:3", MESSAGES), chat_template=REWRITING)


def test_a_template_that_fails_is_named_with_the_line(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ValueError, match=r"data.jsonl:3: the chat template refuses this conversation: no"):
        _encode(tokenizer, ChatRecord("data.jsonl:3", MESSAGES), chat_template="{{ raise_exception('no') }}")


def test_a_chat_without_a_template_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ValueError, match=r"data.jsonl:3: .*needs a chat template.*has none"):
        _encode(tokenizer, ChatRecord("data.jsonl:3", MESSAGES))


def test_mixed_records_keep_their_order(tokenizer: PreTrainedTokenizerBase) -> None:
    records = [TextRecord("f", "a"), ChatRecord("f:1", MESSAGES), PromptRecord("f:2", "b", "c")]
    together = list(Encoder(tokenizer, chat_template=PLAIN).encode(records))
    alone = [_encode(tokenizer, record, chat_template=PLAIN) for record in records]
    assert [document.ids.tolist() for document in together] == [document.ids.tolist() for document in alone]
