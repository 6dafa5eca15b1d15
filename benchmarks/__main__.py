"""Lists the benchmarks of this folder, or runs those that are named: `python -m benchmarks [name ...]`."""

import importlib
import pkgutil
import runpy
import sys

import benchmarks


def names() -> list[str]:
    """The modules of this folder, private ones left out."""
    found = (module.name for module in pkgutil.iter_modules(benchmarks.__path__))
    return sorted(name for name in found if not name.startswith("_"))


def listing() -> str:
    """One line per benchmark: its name and the first line of its docstring."""
    lines = [f"  {name:20} {_first_line(name)}" for name in names()]
    return "\n".join(["benchmarks (run some with: python -m benchmarks NAME ...)", *(lines or ["  none yet"])])


def _first_line(name: str) -> str:
    documentation = importlib.import_module(f"benchmarks.{name}").__doc__ or ""
    return documentation.strip().partition("\n")[0]


def main(chosen: list[str]) -> None:
    """Runs the chosen benchmarks as if each were started with `python -m`; none chosen: prints the list."""
    if unknown := sorted(set(chosen) - set(names())):
        sys.exit(f"no benchmark named {', '.join(unknown)}; use one of {', '.join(names()) or '(none yet)'}")
    if not chosen:
        print(listing())
    for name in chosen:
        print(f"== {name}", flush=True)
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
