"""Runs rows of the ladder, each in a process of its own that may fail, hang or run out of memory without the others."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.kept import Found
from benchmarks.gpu.measure import build
from benchmarks.gpu.rows import Row
from lightning_automodel.planner.flops import count_model

TIMEOUT = 180.0
COMMAND = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu.measure"]


class Worker:
    """The process of a row, which imports what it needs and waits to be told which row it is."""

    def __init__(self) -> None:
        # Files and no pipes: the compiler's own processes inherit them, and a pipe would not end before they do.
        self._out, self._errors = (tempfile.TemporaryFile("w+") for _ in range(2))  # noqa: SIM115 - lives as long
        self._process = subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=self._out,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )

    def tell(self, task: dict[str, Any]) -> None:
        """Let it measure."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already, and said why
            self._process.stdin.write(f"{json.dumps(task)}\n")
            self._process.stdin.close()

    def answer(self, seconds: float) -> tuple[Found, str]:
        """Wait for what it found, or for the error it met, and return that with all that it wrote to stderr."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.end()
            return {"error": f"took more than {seconds:g} s"}, _read(self._errors)
        lines, errors = _read(self._out).strip().splitlines(), _read(self._errors)
        if code or not lines:
            last = (errors.strip().splitlines() or ["no message"])[-1]
            return {"error": f"ended with {code}: {last}"}, errors
        return json.loads(lines[-1]), errors

    def end(self) -> None:
        """Kill it and what it has started, if anything of it is left."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _read(file: Any) -> str:
    file.seek(0)
    return file.read()


class Runner:
    """Starts the process of the next row while a row is measured: imports take as long as the steps of many a row.

    Args:
        rows: how many will be run or skipped.
        smoke: measure their smallest form.
        seconds: after which no row begins.
        folder: for what rows write when they fail, ``errors.log``; ``None``: it goes to stderr.
        profiles: what the device does in a step is found too.
        timeout: seconds that a row may take.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        smoke: bool,
        seconds: float,
        folder: Path | None,
        profiles: bool = False,
        timeout: float = TIMEOUT,
    ) -> None:
        self.smoke, self._folder, self._profiles, self._timeout = smoke, folder, profiles, timeout
        self.minutes, self._end = seconds / 60, time.monotonic() + seconds
        self._left = len(rows)
        self._next: Worker | None = Worker() if rows else None

    def run(self, row: Row) -> Found:
        """Measure the next row; an error, which stands under this name, is a result too."""
        self.skip()
        worker, self._next = self._next, Worker() if self._left else None
        assert worker is not None
        try:
            worker.tell({"row": row.to_dict(), "smoke": self.smoke, "profiles": self._profiles})
            flops = row.rows * flops_of(row.model, row.adapters, row.length, self.smoke)
            found, errors = worker.answer(self._timeout)
        finally:
            worker.end()
        if "error" in found:
            self._note(f"==== {row.table}, {row.name}\n{errors}\n")
        return {"length": row.tokens(self.smoke), "flops": flops} | found

    @property
    def is_over(self) -> bool:
        """Tell whether no further row is to begin."""
        return time.monotonic() > self._end

    def skip(self) -> None:
        """Leave a row out."""
        self._left -= 1

    def close(self) -> None:
        """End what was started ahead."""
        if self._next is not None:
            self._next.end()

    def _note(self, text: str) -> None:
        if self._folder is None:
            print(text, file=sys.stderr, flush=True)
            return
        with (self._folder / "errors.log").open("a") as log:
            log.write(text)


@cache
def flops_of(model: str, adapters: Any, length: int, smoke: bool) -> float:
    """Operations that a row of tokens needs; 0: they are no sum over its tokens (adapters on experts)."""
    row = Row(model=model, length=length, adapters=adapters)
    with torch.device("meta"):
        built = build(row, smoke)
    try:
        return count_model(built).of_documents([row.tokens(smoke)])
    except ValueError:
        return 0.0
