"""docs/performance.md: what every benchmark found last, in a sentence each, and the command that finds it."""

import importlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType

from benchmarks._measure import describe_machine
from benchmarks._page import DOCS, tables_in

PAGE = DOCS / "performance.md"


def load(name: str) -> ModuleType:
    """Import a benchmark."""
    return importlib.import_module(f"benchmarks.{name}")


def path_of(name: str) -> Path:
    """Find the page of a benchmark, as its docstring names it: "Writes docs/overhead.md."."""
    return DOCS / ((load(name).__doc__ or "").partition("Writes docs/")[2].partition(".md")[0] + ".md")


def write(names: Iterable[str], minutes: Mapping[str, float]) -> None:
    """Write the page from the pages of all benchmarks; ``minutes``: of a run of all, if that was one."""
    PAGE.write_text("\n".join(lines(names, together(minutes))) + "\n")


def together(minutes: Mapping[str, float]) -> str:
    """Say how long all took; what the page says of it stays while only some run."""
    if minutes:
        return f"Together they took {sum(minutes.values()):.0f} minutes ({describe_machine()})."
    found = re.search(r"Together they took .*", PAGE.read_text()) if PAGE.exists() else None
    return found[0] if found else ""


def lines(names: Iterable[str], total: str) -> list[str]:
    """The page, line by line; ``total``: how long all took."""
    result = [
        "# Performance",
        "",
        "What each benchmark found last. The page has the table, with its configuration; the command measures it",
        "again, and writes the page, and its figures as JSON below `benchmarks/results/`. `make bench` runs all.",
        f"Exactness is another page: [families](families.md). {total}".rstrip(),
        "",
        "| found | page | command |",
        "|---|---|---|",
    ]
    for name in names:
        path = path_of(name)
        if not path.exists():
            continue
        text = load(name).headline(tables_in(path.read_text().splitlines()))
        result.append(f"| {text} | [{path.stem}]({path.name}) | `python -m benchmarks.{name} --write` |")
    return [*result, "", "On one GPU: [the ladder](gpu_ladder.md), `python -m benchmarks.gpu --write`."]
