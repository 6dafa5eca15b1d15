"""Lists the benchmarks of this folder, or runs some, or all: `python -m benchmarks [--all] [name ...]`."""

import argparse
import importlib
import importlib.util
import pkgutil
import sys
import time
import traceback
from collections.abc import Sequence

import benchmarks
from benchmarks import _performance
from benchmarks._nursery import shared_nursery


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


def succeeds(name: str, options: list[str]) -> bool:
    """Runs one benchmark as its own command would; says why it ends if it fails."""
    module = _performance.load(name)
    if hasattr(module, "__path__"):  # a folder
        module = importlib.import_module(f"benchmarks.{name}.__main__")
    before, sys.argv = sys.argv, [f"benchmarks.{name}", *options]
    try:
        module.main()
    except SystemExit as ending:
        if isinstance(ending.code, str):
            print(ending.code, file=sys.stderr)
        return not ending.code
    except Exception:
        traceback.print_exc()
        return False
    finally:
        sys.argv = before
    return True


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the chosen benchmarks, one after the other in this process; none chosen: prints the list.

    Raises:
        SystemExit: for an unknown name, and if one has failed, after all have run.
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
    minutes, failed = {}, []
    with shared_nursery():  # heavy imports happen once
        for name in chosen:
            print(f"== {name}", flush=True)
            before = time.monotonic()
            if not succeeds(name, options_of_each):
                failed.append(name)
            minutes[name] = (time.monotonic() - before) / 60
    rows = {**minutes, "in all": sum(minutes.values())}
    print("\n".join(f"{name:20} {took:6.1f} min" for name, took in rows.items()))
    if options.write:
        _performance.write(everything, minutes if options.all else {})
    if failed:
        print(f"failed: {', '.join(failed)}")
        sys.exit(1)


if __name__ == "__main__":
    main()
