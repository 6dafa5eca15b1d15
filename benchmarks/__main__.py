"""Lists the benchmarks of this folder, or runs some, or all: `python -m benchmarks [--all] [name ...]`."""

import argparse
import importlib
import importlib.util
import pkgutil
import subprocess
import sys
import time
from collections.abc import Sequence

import benchmarks
from benchmarks import _performance


def names() -> list[str]:
    """What can be run of this folder: its modules, and folders with a ``__main__``; private ones are left out."""
    found = (m.name for m in pkgutil.iter_modules(benchmarks.__path__) if not m.ispkg or _runs(m.name))
    return sorted(name for name in found if not name.startswith("_"))


def _runs(name: str) -> bool:
    return importlib.util.find_spec(f"benchmarks.{name}.__main__") is not None


def listing() -> str:
    """One line per benchmark: its name and the first line of its docstring."""
    lines = [f"  {name:20} {_first_line(name)}" for name in names()]
    return "\n".join(["benchmarks (run some with: python -m benchmarks NAME ..., or --all)", *lines])


def _first_line(name: str) -> str:
    documentation = importlib.import_module(f"benchmarks.{name}").__doc__ or ""
    return documentation.strip().partition("\n")[0]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the chosen benchmarks, each in a process of its own; none chosen: prints the list.

    Raises:
        SystemExit: for an unknown name, and with the first failing benchmark's code after all have run.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of benchmarks")
    parser.add_argument("--all", action="store_true", help="all that write a table of performance")
    parser.add_argument("--write", action="store_true", help="write their pages, and docs/performance.md")
    parser.add_argument("--smoke", action="store_true", help="the smallest form of each: does it run?")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.names) - set(names())):
        sys.exit(f"no benchmark named {', '.join(unknown)}; use one of {', '.join(names())}")
    everything = [name for name in names() if hasattr(_performance.load(name), "headline")]
    chosen = everything if options.all else options.names
    if not chosen:
        print(listing())
        return
    options_of_each = [f"--{name}" for name in ("write", "smoke") if getattr(options, name)]
    minutes, failed = {}, {}
    for name in chosen:
        print(f"== {name}", flush=True)
        before = time.monotonic()
        done = subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *options_of_each], check=False)
        minutes[name] = (time.monotonic() - before) / 60
        if done.returncode:
            failed[name] = done.returncode
    rows = {**minutes, "in all": sum(minutes.values())}
    print("\n".join(f"{name:20} {took:6.1f} min" for name, took in rows.items()))
    if options.write:
        _performance.write(everything, minutes if options.all else {})
    if failed:
        print(f"failed: {', '.join(failed)}")
        sys.exit(next(iter(failed.values())))


if __name__ == "__main__":
    main()
