"""What the planner says of each row of the ladder, without a GPU: `python -m benchmarks.gpu.plan`.

With `--write` it is kept in benchmarks/results/gpu_plan.json, for the pages that are written on a GPU; rows that
`--only` leaves out stay as they are there. Blocks are planned eager and in bfloat16, since the planner runs no
compiler: an upper bound for compiled ones.
"""

import argparse
import json
import logging
import warnings
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch

from benchmarks._page import RESULTS, configuration
from benchmarks.gpu.measure import build
from benchmarks.gpu.rows import FULL, ROWS, Row
from lightning_automodel import FSDP2Config
from lightning_automodel.mesh import resolve_sizes
from lightning_automodel.planner import HARDWARE, Run, plan

PATH = RESULTS / "gpu_plan.json"
UNPLANNED = ("enable_compile", "float8", "loss_kernel")


@dataclass(frozen=True)
class Planned:
    """Peak of memory in GiB, and tokens per second on an H200."""

    gib: float
    speed: int


@cache
def read() -> dict[str, Planned]:
    """Read what was written, by the key of a row; nothing, if nothing was."""
    if not PATH.exists():
        return {}
    return {key: Planned(**found) for key, found in json.loads(PATH.read_text())["rows"].items()}


def plan_row(row: Row, smoke: bool = False) -> Planned:
    """Plan a step of ``row``."""
    switches: Any = FULL if row.by_hand else {k: v for k, v in row.fields.items() if k not in UNPLANNED}
    run = Run(
        sizes=resolve_sizes(1),
        config=FSDP2Config(**switches),
        sequence_length=row.tokens(smoke),
        micro_batch=row.rows,
        precision="bf16-true",
        clips=False,
    )
    with torch.device("meta"):
        model = build(row, smoke)
    found = plan(model, run, HARDWARE["h200"])
    return Planned(gib=round(found.peak / 2**30, 1), speed=round(found.estimate.speed))


def main() -> None:
    """Entry point of ``python -m benchmarks.gpu.plan``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.plan", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {PATH.name}")
    parser.add_argument("--only", default="", help="rows whose table or name contain this")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning_automodel").setLevel("ERROR")
    found = {row.key: asdict(read()[row.key]) for row in ROWS if arguments.only and row.key in read()}
    for row in ROWS:
        if arguments.only in row.key:
            known = plan_row(row)
            found[row.key] = asdict(known)
            fits = ", ".join(n for n in ("h100", "h200") if known.gib < HARDWARE[n].memory / 2**30) or "neither"
            print(f"{known.gib:7.1f} GiB {known.speed:8} tokens/s  fits {fits:10}  {row.key}", flush=True)
    if arguments.write:
        PATH.write_text(json.dumps({**configuration(), "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
