"""The ladder on one CUDA device: what each lever adds, in tokens/s, TFLOP/s, MFU and memory. Writes docs/gpu_ladder.md.

Models have their published sizes and random weights, which are drawn on the device; parameters are in bfloat16, the
optimizer is AdamW. A row is a process of its own, and has all levers of the rows above it. Milliseconds are those of
the median step, with quartiles; tokens per second follow from the median. MFU is what the model needs for its tokens
(forward and backward pass, each product as torch counts it, without recomputation) over the device's dense bfloat16
peak; with float8 too, so that rows compare. Memory is the peak of what is allocated in a measured step, beside what the
planner says of the same row with eager blocks, which need more than compiled ones (`python -m benchmarks.gpu.plan`). A
row of which the planner says that it does not fit the device is not started.
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks._page import Page
from benchmarks.gpu.kept import Found, Kept
from benchmarks.gpu.plan import Planned, read
from benchmarks.gpu.rows import ROWS, Row, smallest
from benchmarks.gpu.runner import TIMEOUT, Runner
from lightning_automodel.planner.hardware import TERA, Hardware, hardware_of

GIB, MINUTES = 2**30, 8.0
COLUMNS = ("", "tokens/s", "ms per step", "TFLOP/s", "MFU", "peak GiB", "planned GiB", "target on an H200")


def main() -> None:
    """Entry point of ``python -m benchmarks.gpu``."""
    page = Page("gpu_ladder.md", "gpu")
    arguments = parse(page)
    if arguments.page is not None:
        write_page(page, arguments.page)
        return
    if not arguments.smoke and not torch.cuda.is_available():
        sys.exit("this ladder needs a CUDA device; --smoke runs its smallest form on the CPU")
    if arguments.out is not None:
        page.move(arguments.out)
    saves = arguments.out is not None or (arguments.write and not arguments.smoke)
    rows = smallest(ROWS) if arguments.smoke and not arguments.only else ROWS
    kept = Kept(arguments.out, arguments.smoke)
    chosen = [row for row in rows if any(part in row.key for part in arguments.only)]
    if arguments.only and not chosen:
        sys.exit(
            f"--only {arguments.only}: no row's name has such a part; python -m benchmarks.gpu.plan names all rows"
        )
    left = chosen if arguments.only else [row for row in rows if row.key not in kept.found]
    page.add(describe(kept))
    runner = Runner(left, arguments.smoke, 60 * arguments.minutes, arguments.out, arguments.profile, arguments.timeout)
    shown = [row for row in rows if row in left or row.key in kept.found]
    try:
        for lines in tables(shown, kept, lambda row: measure(row, runner, kept) if row in left else None):
            page.add(lines)
            if saves:
                page.save()  # what was measured stays, whatever ends the next row
    finally:
        runner.close()
    if not saves:
        page.finish(arguments)


def write_page(page: Page, folder: Path) -> None:
    """Write the page, and its figures, of what was measured on another machine.

    Raises:
        SystemExit: for a folder without rows.
    """
    if not (folder / "rows.json").exists():
        sys.exit(f"--page {folder}: no rows.json is there; give the --out of the machine that measured")
    kept = Kept(folder, elsewhere=True)
    page.configuration = kept.configuration
    page.add(describe(kept))
    device = hardware_of(kept.machine["device"])
    for row in ROWS:
        error = does_not_fit(read().get(row.key), device.memory if device else None)
        kept.found.setdefault(row.key, {"error": error or "not measured"})
    for lines in tables(ROWS, kept, lambda row: None):
        page.add(lines)
    page.save()


def parse(page: Page) -> Namespace:
    """Read the command line."""
    parser = page.parser(__doc__)
    parser.add_argument("--out", type=Path, metavar="DIR", help="write there, row by row, and go on with what it holds")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        help="rows whose table or name contain one of these, again if they were measured",
    )
    parser.add_argument(
        "--page", type=Path, metavar="DIR", help="write the page in docs/ of what another machine left there"
    )
    parser.add_argument("--profile", action="store_true", help="add to rows.json what the device does in a step")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"begin no row after these; {MINUTES:g}")
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help=f"seconds that a row may take; {TIMEOUT:g}")
    return parser.parse_args()


def describe(kept: Kept) -> Iterator[str]:
    """Head of the page."""
    machine = kept.machine
    form = ", smallest form" if machine["smoke"] else ""
    yield from ("# The ladder on one GPU", "", (__doc__ or "").partition("\n\n")[2].strip(), "")
    yield f"{machine['device']}{form}, torch {machine['torch']}. Written by `python -m benchmarks.gpu`."


def tables(rows: list[Row], kept: Kept, prepare: Callable[[Row], None]) -> Iterator[list[str]]:
    """The lines of each row, which ``prepare`` may measure, with the head of a table before its first one."""
    title = ""
    for row in rows:
        head = [] if row.table == title else ["", f"## {row.table}", "", cells(*COLUMNS), "|---" * len(COLUMNS) + "|"]
        title = row.table
        prepare(row)
        plan = None if kept.machine["smoke"] else read().get(row.key)
        yield [*head, line(row, kept.found[row.key], plan, hardware_of(kept.machine["device"]))]


def measure(row: Row, runner: Runner, kept: Kept) -> None:
    """Let the row be measured, unless an error is known before; another call tries again what was not begun."""
    # Of its properties: asking for the memory that is free would take some of it, for a context of this process.
    memory = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else None
    error = does_not_fit(None if runner.smoke else read().get(row.key), memory)
    if error:
        runner.skip()
    elif runner.is_over:
        runner.skip()
        error = f"not measured: {runner.minutes:g} minutes were over"
    kept.add(row.key, {"error": error} if error else runner.run(row), begun=not error)


def does_not_fit(plan: Planned | None, memory: int | None) -> str:
    """Say so if a device has less memory than what was planned; else nothing."""
    if plan is None or memory is None or plan.gib <= memory / GIB:
        return ""
    return f"does not fit: {plan.gib:.0f} GiB planned, {memory / GIB:.0f} GiB there"


def line(row: Row, found: Found, plan: Planned | None, device: Hardware | None) -> str:
    """One line of a table; what cannot run is shown with its error."""
    expected, target = f"{plan.gib}" if plan else "", f"{row.target} tokens/s" if row.target else ""
    if "error" in found:
        return cells(
            row.name, found["error"][:160].replace("|", "/").replace("\n", " "), "", "", "", "", expected, target
        )
    seconds, tokens = found["seconds"], row.rows * found["length"]
    spread = f"{1e3 * seconds:.1f} ({1e3 * found['low']:.1f}-{1e3 * found['high']:.1f})"
    speed = found["flops"] / seconds
    flops, mfu = f"{speed / TERA:.1f}" if speed else "", f"{speed / device.flops:.1%}" if device and speed else ""
    return cells(
        row.name, f"{tokens / seconds:.0f}", spread, flops, mfu, f"{found['peak'] / GIB:.1f}", expected, target
    )


def cells(*texts: str) -> str:
    """A line of a table."""
    return f"| {' | '.join(texts)} |"


if __name__ == "__main__":
    main()
