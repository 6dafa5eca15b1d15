"""Runs of other libraries: as commands of any interpreter or on forked ranks, whose error is a line of a table."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from benchmarks._page import ROOT
from lightning_automodel.testing.pool import ENVIRONMENT, Pool, PoolTimeout, RankFailed

RANKS = 2
SECONDS = 300
LONGEST = 100  # characters of an error in a table
NEMO = ROOT / ".venv-nemo" / "bin" / "python"  # nemo-automodel pins other versions of transformers and megatron-fsdp
WITHOUT_NEMO = {"error": "not installed; `make venv-nemo` makes an environment of its own for it"}


def on_ranks(pool: Pool, function: Callable[..., Any], *arguments: Any, trainer: bool = True) -> list[dict[str, Any]]:
    """Call ``function`` on forked ranks, as torchrun would have started them; return what each rank says."""
    try:
        return pool.run(function, *arguments, timeout=SECONDS, grace=2.0, trainer=trainer)
    except RankFailed as failure:
        return [{"error": error_of(next(iter(failure.failures.values())))}]
    except PoolTimeout:
        return [{"error": f"not done after {SECONDS} s"}]


def by_command(module: str, *arguments: str, ranks: int = RANKS, python: str = sys.executable) -> dict[str, Any]:
    """Start a module with torchrun, or for one rank without; return what its line that begins with RESULT holds."""
    command = [python, "-m", module, *arguments]
    if ranks > 1:
        command[1:2] = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone", "-m"]
    environment = os.environ | ENVIRONMENT
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS, env=environment, cwd=ROOT, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {SECONDS} s"}
    lines = [line.partition(" ")[2] for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(lines[-1]) if lines else {"error": error_of(done.stderr)}


def by_nemo(module: str, *arguments: str, ranks: int = RANKS) -> dict[str, Any]:
    """Start a module with the interpreter that has nemo-automodel."""
    if importlib.util.find_spec("nemo_automodel") is not None:
        return by_command(module, *arguments, ranks=ranks)
    return by_command(module, *arguments, ranks=ranks, python=str(NEMO)) if NEMO.exists() else WITHOUT_NEMO


def versions_of_nemo() -> str:
    """Name what is installed where nemo-automodel is; empty without it."""
    if not NEMO.exists():
        return ""
    names = ("nemo-automodel", "torch", "transformers", "megatron-fsdp")
    code = f"from importlib.metadata import version; print(*(n + ' ' + version(n) for n in {names}), sep=', ')"
    return subprocess.run([NEMO, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def error_of(text: str) -> str:
    """Take the exception's own words from the end of a traceback, as one line for a table."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    starts = [line for line in lines if _is_exception(line.partition(":")[0])]
    name, colon, words = (starts or lines or ["no output"])[-1].partition(":")
    return in_a_line((name.rpartition(".")[2] if starts else name) + colon + words)


def _is_exception(name: str) -> bool:
    return name.rpartition(".")[2].isidentifier() and name.endswith(("Error", "Exception", "Missing", "Exit"))


def in_a_line(text: str) -> str:
    """Cut a message to what a table shows of it."""
    line = " ".join(text.partition("\n")[0].replace("|", "/").split())
    return line if len(line) <= LONGEST else line[: LONGEST - 4].rsplit(" ", 1)[0] + " ..."
