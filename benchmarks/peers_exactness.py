"""transformers' own tensor parallelism against one process, family by family. Writes docs/peers_exactness.md.

    python -m benchmarks.peers_exactness --write    all families; what build/peers_exactness.json holds stays
    python -m benchmarks.peers_exactness --family llama qwen3

It is not among the benchmarks of performance: `make bench` leaves it out, `make bench-smoke` runs its smallest form.
"""

import sys
from argparse import ArgumentParser, BooleanOptionalAction
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks._nursery import shared_nursery
from benchmarks._page import DOCS, ROOT
from benchmarks.exactness.__main__ import run
from benchmarks.exactness.columns import PEERS, all_families
from benchmarks.exactness.report import configuration, table, totals
from benchmarks.exactness.results import BAR, FINE_BAR, Family, Store
from benchmarks.exactness.runner import Runner
from tests.support.families import image_text_families

SECONDS = 120.0  # for one call; what waits for ever then is an error of its family
SMOKE = ("llama",)
NO_PLAN = "has no `tp_plan`"
INTRODUCTION = f"""# transformers' own sharding

What transformers' own tensor parallelism gives, on two CPU ranks, with

    AutoModelForCausalLM.from_pretrained(path, distributed_config=DistributedConfig(tp_size=2, tp_plan="auto"))

(`AutoModelForImageTextToText` for models that read images), for every family that has a plan there: the tiny models,
files and batches of [families](families.md), loss and every gradient of one step against one process, the worst of both
ranks. Nothing of ours runs. The second column accumulates the gradients of two micro-batches before the step, as
`gradient_accumulation_steps=2` does. `shieldgemma2` draws its weights anew each time that it is read, on one process
too.

- **exact**: every relative error (in the 2-norm, tensor by tensor) is at most {BAR:.0e} in float32, or else at most
  {FINE_BAR:.0e} when the same is computed in float64.
- **differs**: the last column says by how much, and in what first. **fails**: with which error.

The same two columns here: *tp=2* and *tp=2, 2 micro-batches* of [families](families.md), which compare the gradient
norm and the parameters after the step as well.

Written by `python -m benchmarks.peers_exactness --write`, which compares what has no result yet; `--family llama` and
`--no-resume` choose.
"""


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``python -m benchmarks.peers_exactness``."""
    options = _parser().parse_args(arguments)
    if options.smoke and options.write:
        sys.exit("--smoke compares a single family, which is no page; leave out one")
    with shared_nursery() as nursery, TemporaryDirectory() as elsewhere:
        store = Store(Path(elsewhere) / "peers_exactness.json" if options.smoke else options.results)
        names = SMOKE if options.smoke else options.family or all_families()
        if not options.resume:
            store.forget(list(names), list(PEERS))
        for name in names:
            run(name, list(PEERS), store, Runner(nursery, SECONDS))
    if options.write:
        (DOCS / "peers_exactness.md").write_text(page(store))


def page(store: Store) -> str:
    """The page: totals, then a row for each family that has a plan there, those that read images apart."""
    images = image_text_families()
    planned = {name: family for name, family in store.families.items() if _has_plan(family)}
    parts = [INTRODUCTION, configuration(store), f"{len(planned)} families: {totals(planned, PEERS)}{_rest(store)}\n"]
    for title, with_images in {"Causal language models": False, "Models that read images": True}.items():
        found = {name: family for name, family in planned.items() if (name in images) == with_images}
        if found:
            parts.append(f"## {title}\n\n{totals(found, PEERS)}\n\n{table(found, PEERS)}\n")
    return "\n".join(parts)


def _rest(store: Store) -> str:
    """Count the model types without a row."""
    missing = len(set(all_families()) - store.families.keys())
    unbuilt = sum(not family.parameters for family in store.families.values())
    unplanned = sum(bool(family.parameters) and not _has_plan(family) for family in store.families.values())
    asked = f" Not asked yet: {missing} model types, with a plan or without." if missing else ""
    return f" No plan there: {unplanned} model types; not built here: {unbuilt}.{asked}"


def _has_plan(family: Family) -> bool:
    return bool(family.cells) and not any(NO_PLAN in cell.failure for cell in family.cells.values())


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="python -m benchmarks.peers_exactness", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write docs/peers_exactness.md")
    parser.add_argument("--smoke", action="store_true", help="the smallest form, once: does it run?")
    parser.add_argument("--family", nargs="+", metavar="NAME", help="model types, such as llama; all if not given")
    parser.add_argument("--resume", action=BooleanOptionalAction, default=True, help="keep what RESULTS holds")
    parser.add_argument(
        "--results", type=Path, default=ROOT / "build" / "peers_exactness.json", help="where results are kept"
    )
    return parser


if __name__ == "__main__":
    main()
