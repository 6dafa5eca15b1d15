"""What all benchmarks share: their command line, the page that they write into docs/, and its figures as JSON."""

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS, RESULTS = ROOT / "docs", ROOT / "benchmarks" / "results"
PACKAGES = (
    *("torch", "lightning", "transformers", "peft", "megatron-fsdp", "nemo-automodel", "accelerate"),
    *("torchao", "liger-kernel", "triton"),
)


@dataclass(frozen=True)
class Table:
    """A table of a page: the titles of its columns, and its rows as they are printed."""

    columns: list[str]
    rows: list[list[str]]

    def cell(self, row: str, column: str) -> str:
        """Read the cell of the first row that begins with ``row`` (several cells: joined by `` | ``)."""
        for cells in self.rows:
            if " | ".join(cells).startswith(row):
                return cells[self.columns.index(column)]
        raise KeyError(f"no row of this table begins with {row!r}")

    def number(self, row: str, column: str) -> float:
        """Read the first number of a cell."""
        text = self.cell(row, column)
        found = re.search(r"-?\d+(?:\.\d+)?(?:e-?\d+)?", text)
        if found is None:
            raise ValueError(f"{text!r}, in row {row!r} and column {column!r}, holds no number")
        return float(found.group())


class Page:
    """A page of docs/ that is printed as it grows, and written with ``--write``, its figures beside it as JSON.

    Args:
        name: of the file in docs/.
        module: of the benchmark, below ``benchmarks``.
        keeps_sections: only what stands above the page's first section is measured; sections stay as they are.
    """

    def __init__(self, name: str, module: str, *, keeps_sections: bool = False) -> None:
        self.path, self.module, self.keeps_sections = DOCS / name, module, keeps_sections
        self.results: Path | None = None
        self.configuration: dict[str, Any] | None = None  # of what was measured elsewhere
        self.lines: list[str] = []

    def move(self, folder: Path) -> None:
        """Let page and figures be written to ``folder``, which is made if it is not there."""
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.results = folder / self.path.name, folder

    def parser(self, description: str | None, rounds: int | None = None) -> argparse.ArgumentParser:
        """Make the command line: ``--write``, ``--smoke``, and ``--rounds`` where rounds are repeated."""
        parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{self.module}", description=description)
        parser.add_argument("--write", action="store_true", help=f"write docs/{self.path.name} and its figures")
        parser.add_argument("--smoke", action="store_true", help="the smallest form, once: does it run?")
        if rounds is not None:
            parser.add_argument("--rounds", type=int, default=rounds, help=f"over all rows; {rounds} if not given")
        return parser

    def add(self, lines: Iterable[str]) -> None:
        """Print lines, one by one as they come, and keep them."""
        for line in lines:
            print(line, flush=True)
            self.lines.append(line)

    def finish(self, arguments: argparse.Namespace, *more: str) -> None:
        """Write page and figures where the command line asks for it, with ``more`` lines at the page's end.

        Raises:
            SystemExit: for ``--write`` with ``--smoke``, whose figures are none.
        """
        if not arguments.write:
            return
        if arguments.smoke:
            sys.exit("--smoke runs the smallest form, once, and measures nothing that is worth writing; leave out one")
        self.save(*more)

    def save(self, *more: str) -> None:
        """Write page and figures as far as they are known, with ``more`` lines at the page's end."""
        lines = [*self.lines, *more]
        sections = ""
        if self.keeps_sections and self.path.exists():
            sections = "".join(self.path.read_text().partition("\n## ")[1:])
        self.path.write_text("\n".join(lines) + "\n" + sections)
        results = self.results or RESULTS
        results.mkdir(exist_ok=True)
        found = {
            "benchmark": self.module,
            **(self.configuration or configuration()),
            "tables": [vars(table) for table in tables_in(lines)],
        }
        (results / f"{self.module}.json").write_text(json.dumps(found, indent=1) + "\n")


def configuration() -> dict[str, Any]:
    """Say when, on what and with which versions something was measured."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "date": str(date.today()),
        "revision": _revision(),
        "machine": {"processor": _processor(), "cores": os.cpu_count(), "system": platform.system()},
        "python": platform.python_version(),
        "versions": versions,
    }


def _revision() -> str:
    if shutil.which("git") is None:  # a bare container
        return ""
    command = ["git", "rev-parse", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def tables_in(lines: Iterable[str]) -> list[Table]:
    """Read the tables of a page."""
    tables: list[Table] = []
    inside = False
    for line in "\n".join(lines).splitlines():
        is_row = line.startswith("|")
        if is_row and not inside:
            tables.append(Table(_cells(line), []))
        elif is_row and set(line) - set("|-: "):
            tables[-1].rows.append(_cells(line))
        inside = is_row
    return tables


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]
