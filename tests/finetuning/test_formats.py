"""Each form of file gives the same records, and never its own syntax as text."""

import bz2
import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from lightning_automodel.finetuning.sources import PromptRecord, Source, TextRecord, find_sources, read_records

RECORDS = [{"prompt": "2 + 2,\n", "completion": ' "4" é'}, {"prompt": "a", "completion": "b"}]


def _write(path: Path, form: str) -> None:
    if form == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(RECORDS), path)
        return
    lines = "\n".join(map(json.dumps, RECORDS)) + "\n"
    csv = 'prompt,completion\n"2 + 2,\n"," ""4"" é"\na,b\n'
    texts = {"jsonl": lines, "json": json.dumps(RECORDS, indent=1), "lines.json": lines, "csv": csv}
    data = texts.get(form, lines).encode()
    compress = {"jsonl.gz": gzip.compress, "jsonl.bz2": bz2.compress, "jsonl.xz": lzma.compress}.get(form)
    path.write_bytes(compress(data) if compress else data)


FORMS = ["jsonl", "json", "lines.json", "csv", "parquet", "jsonl.gz", "jsonl.bz2", "jsonl.xz"]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_records(tmp_path: Path, form: str) -> None:
    path = tmp_path / f"data.{form}"
    _write(path, form)
    found = [(record.prompt, record.completion) for record in read_records([path]) if isinstance(record, PromptRecord)]
    assert found == [(record["prompt"], record["completion"]) for record in RECORDS]


def test_columns_of_other_names(tmp_path: Path) -> None:
    path = tmp_path / "data.tsv"
    path.write_text("question\tanswer\nq\ta\n")
    assert list(read_records([path], {"prompt": "question", "completion": "answer"})) == [
        PromptRecord(f"{path}:2", "q", "a")
    ]
    with pytest.raises(ValueError, match=r"keys answer, question make no record; .*columns="):
        list(read_records([path]))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'{"text": "one"}', "an object; a .json file holds an array"),
        ("a.json", b'[{"text": "one"}', "not JSON"),
        ("a.json", rb'[{"text": "\udc00"}]', "udc00 is half of a pair"),
        ("a.csv", b"text,id\none\n", "2: not as many fields as the header names .text, id."),
        ("a.csv", b'text\n"one" two\n', "not CSV"),
        ("a.jsonl.gz", b"no gzip", "cannot be decompressed as .gz"),
        ("a.parquet", b"no parquet", "not Parquet"),
        ("a.jsonl", b'{"text": "fine"}\n{"text": "\xe9"}\n', "2: not UTF-8"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name}.*{message}"):
        list(read_records([tmp_path / name]))


def test_saved_data_sets(tmp_path: Path) -> None:
    datasets: Any = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"text": "one"}, {"text": "two"}])
    datasets.DatasetDict({"train": rows}).save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"holds the splits train; name one: .*saved/train"):
        find_sources(str(tmp_path / "saved"))
    (source,) = find_sources(str(tmp_path / "saved" / "train"))
    assert source.form == "data set"
    assert list(source.read()) == [
        TextRecord(f"{source.name}:row 1", "one"),
        TextRecord(f"{source.name}:row 2", "two"),
    ]
    assert source.stamp() == Source(source.name).stamp()


def test_names_of_the_hub_that_lead_nowhere() -> None:
    pytest.importorskip("datasets")
    with pytest.raises(ValueError, match="hf:no-one/nothing: the hub gave no such data set"):
        list(find_sources("hf:no-one/nothing")[0].read())
    with pytest.raises(ValueError, match=r"name says nothing; after \? come config, split, revision"):
        list(find_sources("hf:no-one/nothing?name=x")[0].read())
