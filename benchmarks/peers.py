"""The same fine-tuning by other libraries: from the command to the first step, a step, a save. Writes docs/peers.md.

Two ranks read a Llama from its files, take AdamW steps with clipping on two rows per step, and save what a run goes on
from: weights, the optimizer's moments, and what a library adds of its own. "full" trains all weights on two data ranks;
"LoRA" trains adapters of peft on all linear layers; "tp=2" splits the layers. All take torch's fused AdamW, the default
of transformers' Trainer and of our CausalLM. Each library is used as its documentation shows; one that cannot run a
case is shown with its error, in its own words.

Every run of the first table is a command of its own, ``torchrun`` on two ranks: its first step includes imports and
reading; one that is not counted runs before them, so that all find the libraries in memory. The other tables start from
processes that have imported already. Memory is the peak of a rank's resident memory until the save, libraries included.
The tables mix what holds everything on every rank (**DDP**) with what keeps
half of weights, gradients and moments on a rank (**FSDP2**: our default, ``fully_shard``, ModelParallelStrategy,
DistributedConfig): DDP sends less for a step and holds more, so compare one with one. Saves differ in what they write,
which their column shows: some leave out the frozen base of LoRA, and with DDP one rank writes alone.
"""

import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks._attempts import by_command, by_nemo, in_a_line, on_ranks, versions_of_nemo
from benchmarks._measure import describe_machine, quartiles
from benchmarks._nursery import shared_nursery
from benchmarks._page import PACKAGES, Page, Table
from benchmarks._peers import LENGTH, NEMO, RANKS, ROWS, WAYS, WITHOUT_TP, measure, ways_for
from lightning_automodel.testing.pool import Pool

CASES = {"full": "full, dp=2", "lora": "LoRA, dp=2", "tp": "full, tp=2"}
FIRST, STEP = "command to first step, s", "a step, s"
MB = 10**6
SIZES: dict[str, Any] = dict(
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_size=4096,
    use_cache=False,
)
SMALLEST = SIZES | dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, vocab_size=256)
OURS, HF = next(iter(WAYS)), "transformers' Trainer"
SMOKE_WAYS = [OURS, HF, "Trainer + FSDPStrategy"]  # the last one fails here


def main() -> None:
    """Entry point of ``python -m benchmarks.peers``."""
    page = Page("peers.md", "peers")
    parser = page.parser(__doc__, rounds=1)
    parser.add_argument("--only", nargs="*", choices=tuple(WAYS), help="some of the ways")
    arguments = parser.parse_args()
    chosen = arguments.only or (SMOKE_WAYS if arguments.smoke else list(WAYS))
    page.add(describe())
    with shared_nursery() as nursery, tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**(SMALLEST if arguments.smoke else SIZES))).save_pretrained(folder)
        for case in ("full",) if arguments.smoke else CASES:
            ways = [way for way in ways_for(case) if way in chosen]
            page.add(table(Pool(nursery, RANKS), case, ways, folder, 1 if arguments.smoke else arguments.rounds))
    page.finish(arguments)


def headline(tables: list[Table]) -> str:
    """Say what the page shows, in a sentence."""
    first, step = ([tables[0].number(way, column) for way in (OURS, HF)] for column in (FIRST, STEP))
    return (
        f"full fine-tuning on two data ranks: first step after {first[0]:.0f} s ({HF}: {first[1]:.0f} s), "
        f"a step in {step[0] / step[1]:.2f} of its time"
    )


def describe() -> list[str]:
    """Head of the page."""
    sizes = ", ".join(f"{key} {value}" for key, value in SIZES.items() if key != "use_cache")
    versions = ", ".join(f"{name} {version}" for name in PACKAGES if (version := _version(name)) is not None)
    nemo = versions_of_nemo()
    return [
        "# The same run by other libraries",
        "",
        (__doc__ or "").partition("\n\n")[2].strip(),
        "",
        f"Llama, {sizes}; float32; {ROWS} rows of {LENGTH} tokens per step over {RANKS} ranks; {describe_machine()}; "
        f"{versions}{f'; with the versions that it pins, {nemo}' if nemo else ''}. Runs of all ways alternate; medians "
        "over rounds; quartiles of all steps but the first ones. Written by `python -m benchmarks.peers --write`.",
    ]


def table(pool: Pool, case: str, ways: list[str], folder: str, rounds: int) -> Iterator[str]:
    """One table, line by line."""
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    if case == "full":
        run(pool, ways[0], case, folder)  # the first command reads the libraries from the disk, for all others
    for _ in range(rounds):
        for way, runs in found.items():
            if not any("error" in run for run in runs):
                runs.append(run(pool, way, case, folder))
    columns = COLUMNS if case == "full" else {name: cell for name, cell in COLUMNS.items() if name != FIRST}
    ours = _median(found[OURS], "step") if OURS in found else float("nan")
    yield from ("", f"## {CASES[case]}", "")
    yield f"| | {' | '.join(columns)} | step / ours |"
    yield f"|---|{'---|' * len(columns)}---|"
    for way, runs in found.items():
        if error := next((run["error"] for run in runs if "error" in run), None):
            cells = [in_a_line(error), *[""] * len(columns)]
        else:
            cells = [*(cell(runs) for cell in columns.values()), f"{_median(runs, 'step') / ours:.2f}"]
        yield f"| {way} | {' | '.join(cells)} |"
    if case == "tp":
        yield from ("", f"Without tensor parallelism: {', '.join(WITHOUT_TP)}.")


def _median(runs: list[dict[str, Any]], key: str) -> float:
    values = [run[key] for run in runs if key in run]
    return median(values) if values else float("nan")


def _quartiles(runs: list[dict[str, Any]]) -> str:
    low, high = quartiles([seconds for run in runs for seconds in run["steps"]])
    return f"{low:.2f} to {high:.2f}"


COLUMNS = {
    FIRST: lambda runs: f"{_median(runs, 'first'):.2f}",
    STEP: lambda runs: f"{_median(runs, 'step'):.2f}",
    "quartiles of a step": _quartiles,
    "peak of a rank, MB": lambda runs: f"{_median(runs, 'peak') / MB:.0f}",
    "a save, s": lambda runs: f"{_median(runs, 'save'):.2f}",
    "it writes, MB": lambda runs: f"{_median(runs, 'written') / MB:.0f}",
}


def run(pool: Pool, way: str, case: str, folder: str) -> dict[str, Any]:
    """Run one way, and return what its first rank says."""
    started = time.time()
    if way == NEMO:
        found = by_nemo("benchmarks._peers", way, case, folder)
    elif case == "full":
        found = by_command("benchmarks._peers", way, case, folder)
    else:
        found = on_ranks(pool, measure, way, case, folder)[0]
    if "error" in found:
        return found
    return found | {"first": found["first"] - started, "step": median(found["steps"])}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
