"""The same fine-tuning by other libraries: from the command to the first step, a step, a save. Writes docs/peers.md.

Every run is a command of its own, ``torchrun`` on two ranks: it imports, reads a Llama from its files, takes AdamW
steps with clipping on two rows per step, and saves. "full" trains all weights on two data ranks; "LoRA" trains adapters
of peft on all linear layers; "tp=2" splits the layers. Each library is used as its documentation shows, and all take
torch's fused AdamW, the default of transformers' Trainer and of our CausalLM. One that cannot run a case is shown with
its error.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from statistics import median
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks._measure import describe_machine, quartiles
from benchmarks._page import PACKAGES, Page, Table
from benchmarks._peers import LENGTH, RANKS, ROWS, WAYS

CASES = {"full": "full, dp=2", "lora": "LoRA, dp=2", "tp": "full, tp=2"}
FIGURES = {"first": "command to first step", "step": "a step", "save": "a save"}
SECONDS = 300
SIZES: dict[str, Any] = dict(
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_size=8192,
    use_cache=False,
)
SMALLEST = SIZES | dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, vocab_size=256)
OURS, HF = next(iter(WAYS)), "transformers' Trainer"
SMOKE_WAYS = [OURS, HF, "Trainer + FSDPStrategy"]  # the last one fails here


def main() -> None:
    """Entry point of ``python -m benchmarks.peers``."""
    page = Page("peers.md", "peers")
    parser = page.parser(__doc__, rounds=2)
    parser.add_argument("--only", nargs="*", choices=tuple(WAYS), help="some of the ways")
    arguments = parser.parse_args()
    ways = arguments.only or (SMOKE_WAYS if arguments.smoke else list(WAYS))
    page.add(describe())
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**(SMALLEST if arguments.smoke else SIZES))).save_pretrained(folder)
        for case in ("full",) if arguments.smoke else CASES:
            page.add(table(case, ways, folder, 1 if arguments.smoke else arguments.rounds))
    page.finish(arguments)


def headline(tables: list[Table]) -> str:
    """Say what the page shows, in a sentence."""
    first, step = ([tables[0].number(way, f"{FIGURES[key]}, s") for way in (OURS, HF)] for key in ("first", "step"))
    return (
        f"full fine-tuning on two data ranks: first step after {first[0]:.0f} s ({HF}: {first[1]:.0f} s), "
        f"a step in {step[0] / step[1]:.2f} of its time"
    )


def describe() -> list[str]:
    """Head of the page."""
    sizes = ", ".join(f"{key} {value}" for key, value in SIZES.items() if key != "use_cache")
    versions = ", ".join(f"{name} {version}" for name in PACKAGES if (version := _version(name)) is not None)
    return [
        "# The same run by other libraries",
        "",
        (__doc__ or "").partition("\n\n")[2].strip(),
        "",
        f"Llama, {sizes}; float32; {ROWS} rows of {LENGTH} tokens per step over {RANKS} ranks; {describe_machine()}; "
        f"{versions}. Runs of all ways alternate; medians over rounds, of steps with quartiles. Written by "
        "`python -m benchmarks.peers --write`.",
    ]


def table(case: str, ways: list[str], folder: str, rounds: int) -> Iterator[str]:
    """One table, line by line."""
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, runs in found.items():
            if not any("error" in run for run in runs):
                runs.append(run(way, case, folder))
    ours = _median(found[OURS], "step") if OURS in found else None
    yield from ("", f"## {CASES[case]}", "")
    yield f"| | {', s | '.join(FIGURES.values())}, s | quartiles of a step | step / ours |"
    yield "|---|---|---|---|---|---|"
    for way, runs in found.items():
        yield f"| {way} | {' | '.join(cells(runs, ours))} |"


def cells(runs: list[dict[str, Any]], ours: float | None) -> list[str]:
    """What one way took, or its error."""
    if error := next((run["error"] for run in runs if "error" in run), None):
        return [error.replace("|", "/")[:160], *[""] * 4]
    low, high = quartiles([run["step"] for run in runs])
    ratio = "" if ours is None else f"{_median(runs, 'step') / ours:.2f}"
    return [*(f"{_median(runs, key):.2f}" for key in FIGURES), f"{low:.2f} to {high:.2f}", ratio]


def _median(runs: list[dict[str, Any]], key: str) -> float:
    values = [run[key] for run in runs if key in run]
    return median(values) if values else float("nan")


def run(way: str, case: str, folder: str) -> dict[str, Any]:
    """Start one command, and return what its first rank says."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", "--standalone"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command += ["-m", "benchmarks._peers", way, case, folder, repr(time.time())]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {SECONDS} s"}
    lines = [line.partition(" ")[2] for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1]}
    return json.loads(lines[-1])


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
