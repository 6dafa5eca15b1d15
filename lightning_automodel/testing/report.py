"""Words for what went wrong in a call: tracebacks, stacks and output of all ranks."""

import time
from collections.abc import Collection, Iterable
from pathlib import Path

from lightning_automodel.testing.call import Call

OUTPUT_LINES = 60
STACKS_SECONDS = 3.0


def describe_failures(call: Call, failures: dict[int, str]) -> str:
    """Formats the tracebacks, equal ones once, then all output."""
    texts = list(dict.fromkeys(failures.values()))
    parts = [_section(_ranks(failures, text) + " failed", text) for text in texts]
    return "\n".join([_last_line(texts[0]), *parts, *_outputs(call)])


def read_stacks(call: Call, finished: Collection[int]) -> dict[int, str]:
    """Reads the Python stacks that ranks dump by themselves at the deadline; waits until they have."""
    running = [rank for rank in range(call.world_size) if rank not in finished]
    _await_stacks([call.stacks(rank) for rank in running])
    written = {rank: _read(call.stacks(rank)) or "none: the process did not get to run" for rank in running}
    return {rank: written.get(rank, "finished") for rank in range(call.world_size)}


def describe_timeout(call: Call, timeout: float, finished: Collection[int], stacks: dict[int, str]) -> str:
    """Formats who is late, the stacks, then all output."""
    running = ", ".join(str(rank) for rank in stacks if rank not in finished)
    parts = [_section(f"stacks of rank {rank}", text) for rank, text in stacks.items()]
    return "\n".join([f"no answer from rank {running} within {timeout:g} s", *parts, *_outputs(call)])


def _await_stacks(paths: Iterable[Path]) -> None:
    end = time.monotonic() + STACKS_SECONDS
    sizes: dict[Path, int] = {}
    while time.monotonic() < end:
        now = {path: path.stat().st_size if path.exists() else 0 for path in paths}
        if all(now.values()) and now == sizes:
            return
        sizes = now
        time.sleep(0.1)


def _ranks(failures: dict[int, str], text: str) -> str:
    return "rank " + ", ".join(str(rank) for rank, other in sorted(failures.items()) if other == text)


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def _outputs(call: Call) -> list[str]:
    texts = {rank: _read(call.output(rank)) for rank in range(call.world_size)}
    return [_section(f"output of rank {rank}", _tail(text)) for rank, text in texts.items() if text]


def _tail(text: str) -> str:
    return "\n".join(text.splitlines()[-OUTPUT_LINES:])


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _section(title: str, text: str) -> str:
    return f"---- {title} ----\n{text.rstrip()}"
