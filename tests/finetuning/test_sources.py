"""Files and lines that cannot be read are named."""

from pathlib import Path

import pytest

from lightning_automodel.finetuning.sources import ChatRecord, PromptRecord, TextRecord, expand, read_records


def test_a_jsonl_line_is_a_document_of_its_form(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(
        '{"text": "a"}\n\n{"prompt": "q", "completion": "a", "id": 7}\n'
        '{"messages": [{"role": "assistant", "content": "x"}]}\n'
    )
    text, prompt, chat = read_records([file])
    assert text == TextRecord(f"{file}:1", "a")
    assert prompt == PromptRecord(f"{file}:3", "q", "a")
    assert isinstance(chat, ChatRecord)
    assert chat.place == f"{file}:4"


def test_any_other_file_is_one_document(tmp_path: Path) -> None:
    file = tmp_path / "poem.txt"
    file.write_text("one\ntwo\n")
    assert list(read_records([file])) == [TextRecord(str(file), "one\ntwo\n")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": ', "not JSON"),
        ("[1, 2]", "a list; a record is an object"),
        ('{"prompt": "q"}', "keys prompt make no record"),
        ('{"text": 3}', "'text' is a int"),
        ('{"prompt": "q", "completion": null}', "'completion' is a NoneType"),
        (r'{"text": "a\ud83d b"}', "ud83d is half of a pair of surrogates"),
        ('{"messages": []}', "at least one message"),
        ('{"messages": [{"content": "x"}]}', "message 0 must be an object"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "no message has the role 'assistant'"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError, match=f"{file}:2: .*{message}"):
        list(read_records([file]))


def test_bytes_that_are_not_utf8_are_named(tmp_path: Path) -> None:
    file = tmp_path / "latin.txt"
    file.write_bytes(b"fine\ncaf\xe9\n")
    with pytest.raises(ValueError, match=f"{file}:2: not UTF-8"):
        list(read_records([file]))


def test_globs_give_each_file_once_in_order(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("b.txt", "a.txt", "deep/c.txt"):
        (tmp_path / name).write_text("x")
    found = expand([f"{tmp_path}/**/*.txt", f"{tmp_path}/a.txt"])
    assert [file.relative_to(tmp_path).as_posix() for file in found] == ["a.txt", "b.txt", "deep/c.txt"]


def test_patterns_that_name_no_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'nowhere/.*' matches no file"):
        expand("nowhere/*.txt")
    with pytest.raises(ValueError, match="is a directory"):
        expand(str(tmp_path))
