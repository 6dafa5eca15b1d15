"""Renders a conversation with a chat template and finds the characters that the assistant wrote."""

import re
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from lightning_automodel.finetuning.sources import ChatRecord

Span = tuple[int, int]
_render_template: Any = render_jinja_template  # annotated as if it returned a string
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


def render_chat(
    record: ChatRecord, tokenizer: PreTrainedTokenizerBase, chat_template: str | None = None
) -> tuple[str, list[Span]]:
    """Renders the conversation as text, with the spans (in characters) of the assistant's turns.

    A template that marks them with ``{% generation %}`` decides. Otherwise a turn is what the template adds to the
    rendered beginning of the conversation, after the header that asks for an answer.

    Raises:
        ValueError: naming file and line, if the tokenizer has no chat template, the template refuses the conversation,
            or it renders earlier turns differently once later ones follow and marks none.
    """
    template = _template(record, tokenizer, chat_template)
    marked = _MARKED.search(template) is not None
    text, spans = _render(record, tokenizer, template, len(record.messages), return_assistant_tokens_mask=marked)
    if marked:
        return text, spans
    turns = [index for index, message in enumerate(record.messages) if message["role"] == "assistant"]
    return text, [_turn(record, tokenizer, template, text, index) for index in turns]


def read_template(file: str | None) -> str | None:
    """Read a chat template.

    Raises:
        ValueError: if there is no such file.
    """
    if file is None:
        return None
    try:
        return Path(file).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"chat_template={file!r} cannot be read: {error}; give a file that holds a template") from None


def _template(record: ChatRecord, tokenizer: PreTrainedTokenizerBase, chat_template: str | None) -> str:
    if chat_template is None and not tokenizer.chat_template:
        raise ValueError(
            f"{record.place}: a record with 'messages' needs a chat template, and tokenizer "
            f"{tokenizer.name_or_path!r} has none; give chat_template=<file>, or an instruction-tuned model's tokenizer"
        )
    return tokenizer.get_chat_template(chat_template, record.tools)


def _turn(record: ChatRecord, tokenizer: PreTrainedTokenizerBase, template: str, text: str, index: int) -> Span:
    before, _ = _render(record, tokenizer, template, index, add_generation_prompt=True)
    after, _ = _render(record, tokenizer, template, index + 1)
    if not (after.startswith(before) and text.startswith(after)):
        raise ValueError(
            f"{record.place}: the chat template renders message {index} differently when other messages follow, so the "
            "assistant's words cannot be found; mark them in the template with {% generation %}...{% endgeneration %} "
            "(chat_template=<file>), or end the record with its only assistant message"
        )
    return len(before), len(after)


def _render(
    record: ChatRecord, tokenizer: PreTrainedTokenizerBase, template: str, count: int, **options: Any
) -> tuple[str, list[Span]]:
    try:
        texts, spans = _render_template(
            conversations=[record.messages[:count]],
            tools=record.tools,
            chat_template=template,
            **options,
            **tokenizer.special_tokens_map,
        )
    except Exception as error:
        # Templates raise jinja2's errors and whatever their expressions raise.
        raise ValueError(f"{record.place}: the chat template refuses this conversation: {error}") from error
    return texts[0], [(start, stop) for start, stop in spans[0]] if spans else []
