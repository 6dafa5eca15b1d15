"""Pages of benchmarks: tables are read back as they were printed, and every benchmark says what its page shows."""

import json
from pathlib import Path

import pytest

from benchmarks import _page, _performance
from benchmarks.__main__ import main, names
from benchmarks._page import Page, Table, tables_in

LINES = [
    "# Title",
    "",
    "| way | ms | ratio |",
    "|---|---|---|",
    "| ours | 12.5 | 1.00 |",
    "| theirs | 25 (twice) | 2.00 |",
    "",
    "| x |\n|---|\n| 1e-06 |",
]


def test_tables_are_read_back() -> None:
    first, second = tables_in(LINES)
    assert first == Table(["way", "ms", "ratio"], [["ours", "12.5", "1.00"], ["theirs", "25 (twice)", "2.00"]])
    assert first.number("theirs", "ms") == 25
    assert first.number("theirs | 25", "ratio") == 2
    assert second.number("1e", "x") == 1e-6
    with pytest.raises(KeyError, match="begins with 'nobody'"):
        first.number("nobody", "ms")
    with pytest.raises(ValueError, match="'ours', in row 'ours' and column 'way', holds no number"):
        first.number("ours", "way")


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Page:
    monkeypatch.setattr(_page, "RESULTS", tmp_path / "results")
    page = Page("x.md", "x", keeps_sections=True)
    page.path = tmp_path / "x.md"
    page.add(LINES)
    return page


def test_a_page_is_written_with_its_figures_and_keeps_sections(page: Page, tmp_path: Path) -> None:
    page.path.write_text("# Old\n\n## Section\n\nStays.\n")
    page.finish(page.parser(None).parse_args([]))
    assert page.path.read_text().startswith("# Old")
    page.finish(page.parser(None).parse_args(["--write"]))
    assert page.path.read_text() == "\n".join(LINES) + "\n\n## Section\n\nStays.\n"
    page.finish(page.parser(None).parse_args(["--write"]))
    assert page.path.read_text().count("## Section") == 1
    found = json.loads((tmp_path / "results" / "x.json").read_text())
    assert found["tables"][0]["rows"][0] == ["ours", "12.5", "1.00"]
    assert found["versions"]["torch"]
    assert found["machine"]["cores"]
    assert [Table(**table) for table in found["tables"]] == tables_in(LINES)


def test_the_smallest_form_is_not_written(page: Page) -> None:
    with pytest.raises(SystemExit, match="measures nothing that is worth writing"):
        page.finish(page.parser(None).parse_args(["--write", "--smoke"]))
    assert not page.path.exists()


MEASURED = [
    name for name in names() if hasattr(_performance.load(name), "headline") and _performance.path_of(name).exists()
]


@pytest.mark.parametrize("name", MEASURED)
def test_every_benchmark_says_what_its_page_shows(name: str) -> None:
    text = _performance.load(name).headline(tables_in(_performance.path_of(name).read_text().splitlines()))
    assert text
    assert "|" not in text
    assert any(character.isdigit() for character in text)


def test_an_unknown_benchmark() -> None:
    with pytest.raises(SystemExit, match="no benchmark named nothing; use one of activation_memory, "):
        main(["nothing"])
