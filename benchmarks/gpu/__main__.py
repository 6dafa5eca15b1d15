"""The ladder on one CUDA device: what each lever adds, in tokens/s, TFLOP/s, MFU and memory. Writes docs/gpu.md.

Models have their published sizes and random weights; parameters are in bfloat16, the optimizer is AdamW. A row is a
process of its own, and has all levers of the rows above it. Tokens per second are from the median step. MFU is what the
model needs for its tokens (forward and backward pass, each product as torch counts it, without recomputation) over the
device's dense bfloat16 peak; with float8 too, so that rows compare.
"""

import json
import subprocess
import sys
from collections.abc import Iterator

import torch

from benchmarks._page import Page
from benchmarks.gpu.rows import ROWS, Row
from lightning_automodel.planner.hardware import TERA, Hardware, hardware_of

TIMEOUT = 300  # seconds per row


def main() -> None:
    """Entry point of ``python -m benchmarks.gpu``."""
    page = Page("gpu.md", "gpu")
    parser = page.parser(__doc__)
    parser.add_argument("--only", default="", help="rows whose model or name contain this")
    arguments = parser.parse_args()
    if not arguments.smoke and not torch.cuda.is_available():
        sys.exit("this ladder needs a CUDA device; --smoke runs its smallest form on the CPU")
    rows = [row for row in ROWS if arguments.only in f"{row.model} {row.name}"]
    if arguments.smoke:
        rows = [*rows[:2], *rows[2:][-1:]]  # by hand, under the Trainer, and the last one, of experts
    page.add(describe())
    page.add(table(rows, arguments.smoke))
    page.finish(arguments)


def describe() -> Iterator[str]:
    """Head of the page."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, smallest form"
    yield from ("# On one GPU", "", (__doc__ or "").partition("\n\n")[2].strip(), "")
    yield f"{device}, torch {torch.__version__}. Written by `python -m benchmarks.gpu --write`."


def table(rows: list[Row], smoke: bool) -> Iterator[str]:
    """The tables, line by line: one per model, length and kind of training."""
    device = hardware_of(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    title = ""
    for row in rows:
        here = f"{row.model}, {'LoRA' if row.lora else 'full'}, {row.rows} x {row.length} tokens"
        if here != title:
            title = here
            yield from (
                "",
                f"## {title}",
                "",
                "| | tokens/s | TFLOP/s | MFU | peak GiB | target on an H200 |",
                "|---" * 6 + "|",
            )
        yield line(row, run(row, smoke), device)


def line(row: Row, found: dict[str, float] | str, device: Hardware | None) -> str:
    """One line of a table; what cannot run is shown with its error."""
    target = f"{row.target} tokens/s" if row.target else ""
    if isinstance(found, str):
        return f"| {row.name} | {found} | | | | {target} |"
    speed = found["flops"] / found["seconds"]
    mfu = "" if device is None or not speed else f"{100 * speed / device.flops:.1f} %"
    tokens, peak = found["tokens"] / found["seconds"], found["peak"] / 2**30
    return f"| {row.name} | {tokens:.0f} | {f'{speed / TERA:.1f}' if speed else ''} | {mfu} | {peak:.1f} | {target} |"


def run(row: Row, smoke: bool) -> dict[str, float] | str:
    """Measure a row in a process of its own; return its last line of errors where it fails."""
    task = json.dumps({"row": row.to_dict(), "smoke": smoke})
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu.measure", task]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return f"took more than {TIMEOUT} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["no error message"])[-1][:160].replace("|", "/")
    return json.loads(done.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    main()
