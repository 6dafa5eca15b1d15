"""Reads a page with the parser of the standard library: is it whole, does it load something, what does it show."""

from html.parser import HTMLParser

_ALONE = {"meta", "input", "br", "hr", "img", "link"}
_LOADS = {"src", "srcset", "data", "poster", "action", "xlink:href"}


class Page(HTMLParser):
    """What a page holds.

    Attributes:
        text: all that is shown.
        rows: texts of the fields of each table, by its id, without the headings.
        loads: addresses that a browser would fetch.
        tags: names of all elements.
    """

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.text, self.tags = "", []
        self.rows: dict[str, list[list[str]]] = {}
        self.loads: list[str] = []
        self._open: list[str] = []
        self._table = ""
        self.feed(markup)
        self.close()
        assert self._open == [], f"not closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.tags.append(tag)
        self.loads += [value for name, value in given.items() if name in _LOADS or (tag == "link" and name == "href")]
        assert not [name for name in given if name.startswith("on")], given
        if tag not in _ALONE:
            self._open.append(tag)
        if tag == "table":
            self._table = given["id"]
            self.rows[self._table] = []
        elif tag == "tr" and "tbody" in self._open:
            self.rows[self._table].append([])
        elif tag == "td":
            self.rows[self._table][-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _ALONE:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        if "script" in self._open or "style" in self._open:
            assert "http" not in data, data
            assert "@import" not in data
            assert "url(" not in data
            return
        self.text += data
        if "td" in self._open:
            self.rows[self._table][-1][-1] += data


def is_alone(page: Page) -> bool:
    """Whether nothing is fetched."""
    return not page.loads and not {"iframe", "object", "embed", "img"} & set(page.tags)
