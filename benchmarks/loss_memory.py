"""Memory and time of head and loss: plain, cut on the vocabulary, in chunks, by others. Writes docs/loss_memory.md.

Each measurement is a process of its own (one per rank): hidden states, weight and labels are made, then the forward and
backward pass runs once. Memory is the peak above what was held before, so the gradient of the weight counts and the
weight does not: on the CPU of resident memory, on CUDA of allocated memory. Time is that of the process on the CPU (the
machine may be shared), the wall clock on CUDA. What is compiled has been compiled before.
"""

import argparse
import json
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import date

import torch
import transformers

from benchmarks._attempts import by_nemo, in_a_line, on_ranks, versions_of_nemo
from benchmarks._losses import NEMO, OURS, PEERS, Task, measure
from benchmarks._nursery import shared_nursery
from benchmarks._page import Page, Table
from lightning_automodel.testing.pool import Nursery, Pool

GIB = 2**30
GRIDS = {
    "cpu": [(32_000, 4096), (128_000, 768)],
    "cuda": [(v, t) for v in (32_000, 128_000, 256_000) for t in (8192, 32_768)],
}
SMOKE_PEERS = [name for name in PEERS if name.startswith(("torch's", "Liger"))]  # the last one fails here
Found = dict[str, float]


def main() -> None:
    """Entry point of ``python -m benchmarks.loss_memory``."""
    page = Page("loss_memory.md", "loss_memory")
    arguments = parse(page)
    template = Task(
        way="",
        vocabulary=0,
        tokens=0,
        hidden=arguments.hidden,
        chunk=arguments.chunk,
        dtype=arguments.dtype,
        device=arguments.device,
    )
    page.add([*describe(arguments), ""])
    grid = [(512, 64)] if arguments.smoke else GRIDS[arguments.device]
    with shared_nursery() as nursery:
        measured: dict[tuple[int, int], dict[str, Found | None]] = {}
        page.add(rows(nursery, template, arguments.memory * GIB, grid, measured))
        vocabulary, tokens = grid[0]
        template = replace(template, vocabulary=vocabulary, tokens=tokens)
        page.add(
            peers(nursery, template, measured[vocabulary, tokens], SMOKE_PEERS if arguments.smoke else list(PEERS))
        )
    page.finish(arguments)


def headline(tables: list[Table]) -> str:
    """Say what the page shows, in a sentence."""
    row = next(row for row in tables[0].rows if row[2] == "GiB per rank" and "(" in row[6])
    return f"{row[1]} tokens and {row[0]} classes: a loss in chunks takes {row[6]} GiB for {row[3]}"


def parse(page: Page) -> argparse.Namespace:
    """Read the command line."""
    parser = page.parser(__doc__)
    parser.add_argument("--device", choices=list(GRIDS), default="cpu")
    parser.add_argument("--hidden", type=int, help="width of the model; 512 on cpu, 4096 on cuda")
    parser.add_argument("--dtype", help="float32 on cpu, bfloat16 on cuda")
    parser.add_argument("--chunk", type=int, help="tokens per chunk; 256 on cpu, 1024 on cuda")
    parser.add_argument("--memory", type=float, default=8, help="GiB; what would need more is left out")
    arguments = parser.parse_args()
    on_cpu = arguments.device == "cpu"
    arguments.hidden = arguments.hidden or (512 if on_cpu else 4096)
    arguments.dtype = arguments.dtype or ("float32" if on_cpu else "bfloat16")
    arguments.chunk = arguments.chunk or (256 if on_cpu else 1024)
    return arguments


def describe(arguments: argparse.Namespace) -> list[str]:
    """Head of the page."""
    on_cpu = arguments.device == "cpu"
    machine = f"{platform.machine()}, {os.cpu_count()} cores" if on_cpu else torch.cuda.get_device_name()
    return [
        "# Memory and time of head and loss",
        "",
        (__doc__ or "").partition("\n\n")[2].strip(),
        "",
        f"hidden {arguments.hidden}, {arguments.dtype}, chunks of {arguments.chunk} tokens, {arguments.device} "
        f"({machine}), one thread per rank; torch {torch.__version__}, transformers {transformers.__version__}; "
        f"{date.today()}. Written by `python -m benchmarks.loss_memory --device {arguments.device} --write`.",
        "",
        *(f"- {name}: {meaning}" for name, (_, meaning) in OURS.items()),
        "",
        f"`-`: would need more than {arguments.memory:.0f} GiB (or a second GPU). In parentheses: against plain.",
    ]


def rows(
    nursery: Nursery,
    template: Task,
    memory: float,
    grid: list[tuple[int, int]],
    measured: dict[tuple[int, int], dict[str, Found | None]],
) -> Iterator[str]:
    """First table, line by line; fills ``measured`` by size and name."""
    yield "| vocabulary | tokens | | " + " | ".join(OURS) + " |"
    yield "|---" * (3 + len(OURS)) + "|"
    for vocabulary, tokens in grid:
        task = replace(template, vocabulary=vocabulary, tokens=tokens)
        results = {name: run(nursery, replace(task, way=name), memory) for name in OURS}
        measured[vocabulary, tokens] = results
        for unit, key in (("GiB per rank", "peak"), ("seconds", "seconds")):
            cells = " | ".join(cell(result, results["plain"], key) for result in results.values())
            yield f"| {vocabulary // 1000}k | {tokens} | {unit} | {cells} |"


def cell(result: Found | None, plain: Found | None, key: str) -> str:
    """One figure, with its ratio to the plain way's."""
    if result is None:
        return "-"
    value = result[key] / GIB if key == "peak" else result[key]
    if plain is None or plain is result:
        return f"{value:.2f}"
    ratio = result[key] / plain[key]
    return f"{value:.2f} (1/{1 / ratio:.1f})" if key == "peak" else f"{value:.2f} ({ratio:.2f} x)"


def run(nursery: Nursery, task: Task, memory: float) -> Found | None:
    """The worst of the ranks, or ``None`` if it is left out."""
    if expected_memory(task) > memory or (task.device == "cuda" and task.ranks > torch.cuda.device_count()):
        return None
    ranks = Pool(nursery, task.ranks).run(measure, task, trainer=True, timeout=600)
    return {key: max(rank[key] for rank in ranks) for key in ranks[0]}


def expected_memory(task: Task) -> float:
    """Bytes on all ranks, roughly: in float32 the logits, their logarithms and two gradients."""
    copies = {"plain": 3, "whole": 2, "cut": 2}.get(task.way, 0)
    return 4.0 * task.vocabulary * (copies * task.tokens + 2 * task.hidden + task.ranks * task.chunk)


def peers(nursery: Nursery, task: Task, ours: dict[str, Found | None], names: list[str]) -> Iterator[str]:
    """Second table, line by line: what others have for the same, on one rank."""
    pins = versions_of_nemo()
    yield from (
        "",
        "## By others",
        "",
        f"{task.tokens} tokens and {task.vocabulary} classes on one process. The last column compares the loss and",
        "the norm of both gradients with those of the plain loss. Liger's kernel is for GPUs and no dependency",
        "of ours. nemo-automodel pins other versions than ours, so that it runs in an environment of its own, which",
        f"`make venv-nemo` makes{f': {pins}' if pins else ''}. Its chunks are of the same size, and compiled.",
        "",
        "| | seconds | GiB | differs by |",
        "|---|---|---|---|",
    )
    plain = ours["plain"]
    for name in ("plain", "chunked"):
        yield f"| {OURS[name][1]} | {figures(ours[name], plain)} |"
    for name in names:
        yield f"| {name} | {figures(run_peer(nursery, replace(task, way=name)), plain)} |"


def run_peer(nursery: Nursery, task: Task) -> dict[str, float | str]:
    """What one way of others takes, or its error."""
    if task.way == NEMO:
        return by_nemo("benchmarks._losses", json.dumps(asdict(task)), ranks=1)
    return on_ranks(Pool(nursery, 1), measure, task)[0]


def figures(found: dict[str, float] | dict[str, float | str] | None, plain: Found | None) -> str:
    """Cells of one row."""
    if found is None:
        return "- | - | -"
    if "error" in found:
        return f"{in_a_line(str(found['error']))} | | "
    values = {key: float(value) for key, value in found.items()}
    cells = " | ".join(cell(plain if found is plain else values, plain, key) for key in ("seconds", "peak"))
    if plain is None:
        return f"{cells} | -"
    return f"{cells} | {max(abs(values[key] / plain[key] - 1) for key in ('loss', 'norm')):.0e}"


if __name__ == "__main__":
    main()
