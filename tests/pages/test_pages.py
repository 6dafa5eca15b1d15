"""What pages are made of: charts, bars and tables, filled with what people may write, and a script that sorts."""

import math
from pathlib import Path

import pytest

from lightning_automodel.pages import Bar, Bars, Cell, Chart, Line, Segment, Table, render, save
from lightning_automodel.pages.charts import HEIGHT, WIDTH, short, thin, ticks
from tests.support import browser
from tests.support.markup import Page, is_alone

HOSTILE = """</script><img src=x onerror="alert(1)">{{ 7 * 7 }}'&"""
NUMBERS = Table("numbers", ["name", "size"], [["b", Cell("2 k", 2000)], ["a", Cell("")], ["c", Cell("30", 30)]])


def page_of(table: Table) -> str:
    return render(
        "run.html",
        title=HOSTILE,
        lead=[],
        lines=[],
        by_tokens=False,
        sections=[],
        summary=table,
        differences=None,
        tables=[(HOSTILE, HOSTILE)],
        configs=[],
    )


def test_what_is_not_markup_is_escaped() -> None:
    page = Page(page_of(Table("hostile", ["a"], [[HOSTILE]])))
    assert page.rows["hostile"] == [[HOSTILE]]
    assert page.text.count(HOSTILE) == 4  # title, heading, field, table at the start
    assert is_alone(page)


def test_ticks_are_round() -> None:
    assert ticks(0, 100, 5) == [0, 20, 40, 60, 80, 100]
    assert ticks(0.0007, 0.002, 5) == pytest.approx([0.001, 0.0015, 0.002])
    assert [short(x) for x in (0, 0.0015, 12.5, 1500, 2e6, 3.25e9)] == ["0", "0.0015", "12.5", "1.5k", "2M", "3.25G"]


def test_a_chart_places_points_within_its_frame() -> None:
    points = [(float(step), math.sin(step)) for step in range(5000)]
    chart = Chart("t", "steps", [Line("a", 1, [*points, (5000.0, math.nan), (5001.0, math.inf)])], (0.0, 5001.0))
    ((_, placed),) = chart.paths
    assert 100 < len(placed) <= 1000
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in placed)
    kept = thin(points)
    assert min(y for _, y in kept) == min(y for _, y in points)
    assert max(y for _, y in kept) == max(y for _, y in points)
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)


def test_a_chart_of_one_value_and_of_none() -> None:
    one = Chart("t", "steps", [Line("a", 1, [(3.0, 0.0)])], (0.0, 3.0))
    assert one.y_range == (-1.1, 1.1)
    assert Chart("t", "steps", [Line("a", 1, [(3.0, math.nan)])], (0.0, 3.0)).paths[0][1] == []


def test_bars_show_the_limit_where_they_come_near() -> None:
    def bars(size: float) -> Bars:
        return Bars([Bar("a", [Segment("x", 1, size, ""), Segment("y", 2, 0, "")], "")], 100, "")

    assert bars(60).scale == pytest.approx(102)
    assert bars(60).shows_limit
    assert not bars(2).shows_limit  # a fiftieth: too short to see beside the limit
    assert bars(150).scale == pytest.approx(153)
    assert [s.name for s in bars(60).legend] == ["x"]


def test_a_page_that_cannot_be_written(tmp_path: Path) -> None:
    save(str(tmp_path / "new" / "page.html"), "text")
    assert (tmp_path / "new" / "page.html").read_text() == "text"
    with pytest.raises(ValueError, match="cannot write"):
        save(str(tmp_path), "text")


@pytest.mark.skipif(browser.find() is None, reason="there is no Chromium on this machine")
def test_the_script_sorts(tmp_path: Path) -> None:
    """By the page's address, as a click on a heading leaves it; what has no number comes last both ways."""
    file = tmp_path / "page.html"
    save(str(file), page_of(NUMBERS))
    for address, names in (("", "bac"), ("#sort=numbers:size:up", "cba"), ("#sort=numbers:size:down", "bca")):
        rows = Page(browser.dump(f"file://{file}{address}")).rows["numbers"]
        assert "".join(row[0] for row in rows) == names, address
    clicks = "<script>document.querySelectorAll('#numbers th')[1].click()</script></body>"
    file.write_text(file.read_text().replace("</body>", clicks))
    markup = browser.dump(f"file://{file}")
    assert [row[0] for row in Page(markup).rows["numbers"]] == ["c", "b", "a"]
    assert markup.count('aria-sort="ascending">') == 1
