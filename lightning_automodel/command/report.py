"""The subcommand ``report``: a page with what one run, or several side by side, have logged."""

import bisect
import math
import re
import statistics
import sys
from argparse import ArgumentError
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import yaml
from jsonargparse import ArgumentParser

from lightning_automodel.command.logged_run import LoggedRun, Series, read_runs
from lightning_automodel.command.mistakes import describe_mistake
from lightning_automodel.pages import Cell, Chart, Line, Table, charts, render, save

_DESCRIPTION = "Writes a page of one file with what runs have logged: charts, the start of the run, its configuration."
_SECTIONS = (
    ("Training", r"^(train[/_.])?loss|^lr\b|^lr-|learning.?rate|grad.*norm|norm.*grad"),
    ("Validation", r"^(val|valid|validation|test)[/_.]"),
    ("Speed", r"second|/s$|mfu|flops|throughput|time"),
    ("Memory", r"mem|alloc|reserved"),
    ("Other", r""),
)
"""Heading, and what the names of its numbers match; the first that matches has it."""
_TOKENS = ("tokens_seen", "tokens")
"""Ends of the names under which tokens are counted, the one that counts all of them first."""
_SUMMARY: tuple[tuple[str, str, Callable[[Sequence[float]], float]], ...] = (
    ("last loss", r"^(train[/_.])?loss(_step)?$", lambda values: values[-1]),
    ("lowest validation loss", r"^val\w*[/_.]loss", min),
    ("median tokens/s", r"tokens_per_second$", statistics.median),
    ("median MFU", r"mfu$", statistics.median),
    ("highest memory", r"mem", max),
)


def report_command(args: Sequence[str]) -> None:
    """Run ``lightning-automodel report`` with these arguments: write the page.

    Raises:
        ValueError: if an argument is not right, or a directory has no logged numbers.
    """
    parser = ArgumentParser(
        prog="lightning-automodel report", description=_DESCRIPTION, exit_on_error=False, allow_abbrev=False
    )
    parser.add_argument("runs", nargs="+", type=str, help="log directories of runs, or directories above several")
    parser.add_argument("--output", type=str, default="report.html", help="file to write")
    try:
        given = parser.parse_args(list(args))
    except ArgumentError as error:
        raise ValueError(describe_mistake(str(error), ["output"], [])) from None
    found = read_runs(given.runs)
    save(given.output, run_page(found))
    sys.stdout.write(f"The page is written to {given.output}: {', '.join(run.name for run in found)}\n")


def run_page(runs: Sequence[LoggedRun]) -> str:
    """Write the page of these runs."""
    several = len(runs) > 1
    tokens = [_tokens_of(run) for run in runs]
    return render(
        "run.html",
        title=f"{len(runs)} runs" if several else f"Run: {runs[0].folder}",
        lead=[*(f"{run.name}: {run.folder}" for run in runs if several), "A chart shows the values below the pointer."],
        lines=[SimpleNamespace(name=run.name, slot=slot) for slot, run in enumerate(runs, 1)],
        by_tokens=any(tokens),
        sections=list(_sections(runs, tokens)),
        frame=SimpleNamespace(
            width=charts.WIDTH,
            height=charts.HEIGHT,
            left=charts.LEFT,
            right=charts.RIGHT,
            top=charts.TOP,
            bottom=charts.BOTTOM,
        ),
        summary=_summary(runs, tokens),
        differences=_differences(runs) if several else None,
        tables=[(run.name, run.table) for run in runs if run.table],
        configs=[(run.name, run.config) for run in runs if run.config],
    )


# ---- charts ----------------------------------------------------------------------------------------------------------


def _sections(runs: Sequence[LoggedRun], tokens: Sequence[Series]) -> Iterator[tuple[str, list[list[Chart]]]]:
    names = sorted({name for run in runs for name in run.numbers if not _counts_tokens(name)}, key=_place)
    for heading, _ in _SECTIONS:
        chosen = [name for name in names if _section(name) == heading]
        if chosen:
            yield heading, [list(_variants(name, runs, tokens)) for name in chosen]


def _section(name: str) -> str:
    return next(heading for heading, pattern in _SECTIONS if re.search(pattern, name, re.IGNORECASE))


def _place(name: str) -> tuple[bool, str]:
    """Sort losses before the others."""
    return "loss" not in name, name


def _variants(name: str, runs: Sequence[LoggedRun], tokens: Sequence[Series]) -> Iterator[Chart]:
    """Draw a number over steps, and over tokens where a run has counted them."""
    having = [(slot, run, tokens[slot - 1]) for slot, run in enumerate(runs, 1) if name in run.numbers]
    last = max(step for run in runs for values in run.numbers.values() for step, _ in values)
    yield Chart(name, "steps", [Line(run.name, slot, run.numbers[name]) for slot, run, _ in having], (0.0, last or 1.0))
    if any(tokens):
        lines = [Line(run.name, slot, _over(run.numbers[name], counted)) for slot, run, counted in having if counted]
        yield Chart(name, "tokens", lines, (0.0, max(count for counted in tokens for _, count in counted) or 1.0))


def _tokens_of(run: LoggedRun) -> Series:
    """Return how many tokens had been seen at which step, if the run says so."""
    counted = {name.rpartition("/")[2]: values for name, values in run.numbers.items() if _counts_tokens(name)}
    return next((counted[name] for name in _TOKENS if name in counted), [])


def _counts_tokens(name: str) -> bool:
    return name.rpartition("/")[2] in _TOKENS


def _over(values: Series, counted: Series) -> Series:
    """Put the tokens that had been seen in the place of steps; between two counts, in proportion."""
    steps = [step for step, _ in counted]
    found = []
    for step, value in values:
        i = min(bisect.bisect_left(steps, step), len(steps) - 1)
        (s0, t0), (s1, t1) = counted[i - 1] if i else counted[0], counted[i]
        share = min(max((step - s0) / (s1 - s0), 0.0), 1.0) if s1 > s0 else 0.0
        found.append((t0 + share * (t1 - t0), value))
    return found


# ---- tables ----------------------------------------------------------------------------------------------------------


def _summary(runs: Sequence[LoggedRun], tokens: Sequence[Series]) -> Table:
    shown = [one for one in _SUMMARY if any(_values(run, one[1]) for run in runs)]
    rows: list[list[Cell | str]] = []
    for run, counted in zip(runs, tokens, strict=True):
        steps = max((step for values in run.numbers.values() for step, _ in values), default=0.0)
        numbers = [_cell(steps), _cell(counted[-1][1] if counted else math.nan)]
        for _, pattern, choose in shown:
            values = _values(run, pattern)
            numbers.append(_cell(choose(values) if values else math.nan))
        rows.append([run.name, *numbers])
    columns = ["last step", "tokens", *(name for name, _, _ in shown)]
    return Table("summary", ["run", *columns], rows, frozenset(columns))


def _values(run: LoggedRun, pattern: str) -> list[float]:
    """Return the numbers of the first name that matches."""
    for name, values in run.numbers.items():
        if re.search(pattern, name, re.IGNORECASE):
            return [value for _, value in values if math.isfinite(value)]
    return []


def _cell(number: float) -> Cell:
    return Cell("") if math.isnan(number) else Cell(f"{number:,.0f}" if number >= 1000 else f"{number:.5g}", number)


def _differences(runs: Sequence[LoggedRun]) -> Table | None:
    """List the settings that are not the same in all runs."""
    flat = [dict(_flattened(yaml.load(run.config, _Plain))) for run in runs if run.config]
    names = [run.name for run in runs if run.config]
    keys = dict.fromkeys(key for one in flat for key in one)
    rows = [[key, *(one.get(key, "") for one in flat)] for key in keys if len({one.get(key) for one in flat}) > 1]
    return Table("differences", ["setting", *names], rows) if rows else None


class _Plain(yaml.SafeLoader):
    """Reads tags of Python's objects, which Lightning writes into hparams.yaml, as nothing."""

    yaml_multi_constructors = {"": lambda loader, suffix, node: f"!{suffix}"}  # noqa: RUF012 - as yaml has it


def _flattened(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from _flattened(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, str(value)
