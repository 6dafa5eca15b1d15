"""The command line: runs what has no result yet, prints it, and writes the tables."""

import argparse
import time
from pathlib import Path

from benchmarks._nursery import shared_nursery
from benchmarks.exactness.columns import EXTRA, MAIN, all_families
from benchmarks.exactness.oracle import check
from benchmarks.exactness.report import write
from benchmarks.exactness.results import Family, Store
from benchmarks.exactness.runner import Runner, pending

ROOT = Path(__file__).resolve().parents[2]


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``python -m benchmarks.exactness``."""
    options = _parser().parse_args(arguments)
    store = Store(options.results)
    families = options.family or all_families()
    if not options.resume:
        store.forget(families, options.columns)
    start = time.monotonic()
    with shared_nursery() as nursery:
        for name in families:
            run(name, options.columns, store, Runner(nursery))
        if options.oracle:
            store.oracle = check(nursery, {name: store.families[name] for name in families})
    store.save()
    write(store, options.table)
    print(f"{options.table} written after {time.monotonic() - start:.0f} s")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exactness", description=__doc__)
    parser.add_argument(
        "--family", nargs="+", metavar="NAME", help="model types, such as llama; all of them if not given"
    )
    columns = [*MAIN, *EXTRA]
    parser.add_argument("--columns", nargs="+", choices=columns, default=columns, help="all if not given")
    parser.add_argument("--resume", action=argparse.BooleanOptionalAction, default=True, help="keep what RESULTS holds")
    parser.add_argument("--oracle", action="store_true", help="also compare placements with those that an oracle finds")
    parser.add_argument(
        "--results", type=Path, default=ROOT / "build" / "exactness.json", help="where results are kept"
    )
    parser.add_argument("--table", type=Path, default=ROOT / "docs" / "families.md", help="what is written in the end")
    return parser


def run(name: str, keys: list[str], store: Store, runner: Runner) -> None:
    """Compare a family in those of the columns ``keys`` that have no result yet, save and print what was found."""
    known = store.families.get(name)
    columns = pending(known, name, keys)
    if not columns:
        return
    start = time.monotonic()
    family = store.families[name] = runner.family(name, columns, known)
    seconds = time.monotonic() - start
    store.seconds += seconds
    store.save()
    print(f"{name:28} {_summary(family, list(columns))}  {seconds:.1f} s", flush=True)


def _summary(family: Family, columns: list[str]) -> str:
    if not family.parameters:
        return f"not built: {family.reason}"
    cells = {key: family.cells[key] for key in columns if key in family.cells}
    texts = [f"{key} {c.error:.0e}{'' if c.exact else ' ' + (c.failure or c.where)}" for key, c in cells.items()]
    return ", ".join(texts) or "no plan"


if __name__ == "__main__":
    main()
