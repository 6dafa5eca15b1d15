"""What benchmarks measure with: process memory, medians, seconds."""

import json
import os
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks._page import configuration


def medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Take the median of each figure over the runs."""
    return {key: median(run[key] for run in runs) for key in runs[0]}


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the first and the third quartile, or a single value twice."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, high


def between(values: Sequence[float], digits: int = 0) -> str:
    """Spell the quartiles of values as a cell of a table."""
    low, high = quartiles(values)
    return f"{low:.{digits}f} to {high:.{digits}f}"


def describe_machine(*packages: str, devices: str = "") -> str:
    """Say when, on what and with which versions, for the head of a page.

    Args:
        packages: named beside torch, Lightning and transformers.
        devices: what computes, and what it communicates with; the cores of this machine if not given.
    """
    found = configuration()
    devices = (
        devices or f"{found['machine']['cores']} cores of {found['machine']['processor']}, gloo, one thread per rank"
    )
    versions = (f"{name} {found['versions'][name]}" for name in ("torch", "lightning", "transformers", *packages))
    return f"{found['date']}, {devices}; {', '.join(versions)}"


class Memory:
    """Memory of this process while a block runs, above what it held before.

    Attributes:
        own: peak of anonymous memory in bytes, looked at every 2 ms: what no file backs.
        resident: peak of all resident memory in bytes, pages of memory-mapped files included.
        seconds: wall clock.
    """

    def __init__(self) -> None:
        self.own = 0
        self.resident = 0
        self.seconds = 0.0

    @contextmanager
    def measured(self) -> Generator["Memory", None, None]:
        """Fills the attributes."""
        own, resident = status("RssAnon"), status("VmRSS")
        forget_peak()
        done = threading.Event()

        def watch() -> None:
            while not done.wait(0.002):
                self.own = max(self.own, status("RssAnon") - own)

        watcher = threading.Thread(target=watch)
        watcher.start()
        start = time.perf_counter()
        try:
            yield self
        finally:
            self.seconds = time.perf_counter() - start
            done.set()
            watcher.join()
            self.resident = status("VmHWM") - resident


def forget_peak() -> None:
    """Count the peak of resident memory (``VmHWM``) from here."""
    Path("/proc/self/clear_refs").write_text("5")


def status(field: str) -> int:
    """Read a field of this process, in bytes; Linux only."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {field}; this benchmark needs Linux")


def timed(function: Callable[[], Any]) -> float:
    """Wall-clock seconds of a call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def print_result(measure: Callable[[], Mapping[str, Any]]) -> None:
    """Print what ``measure`` returns, or its error, on rank 0 as the line that ``_attempts.by_command`` reads; end."""
    try:
        result = measure()
    except Exception as error:  # what a peer cannot do is what the table shows
        result = {"error": f"{type(error).__name__}: {error}"}
    if int(os.environ["RANK"]) == 0:
        print("RESULT " + json.dumps(result), flush=True)
    os._exit(0)  # a peer that failed may leave threads that wait
