"""Two torchrun agents, and the processes that they start."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.faults.chains import Story
from tests.harness.pool import ENVIRONMENT, ROOT

RESTARTS = 3
# Else the workers of all restarts share one store, and read addresses of dead ones in it (pytorch 135712).
FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Agent:
    """One node of a run of two: ``torchrun`` with one worker.

    Args:
        directory: for checkpoints, journals and output.
        name: of the file with the output.
        endpoint: of the rendezvous.
        host: whether it keeps the rendezvous.
        timeout: seconds, of collectives.
        prefix: what the command is run with.
        environment: for the agent and its worker.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        endpoint: str,
        host: bool,
        *,
        timeout: float = 20,
        prefix: list[str] | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.output = directory / f"{name}.txt"
        command = [
            *(prefix or []),
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"),
            *(f"--max-restarts={RESTARTS}", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=faults"),
            *(f"--rdzv-conf=is_host={int(host)}", "-m", "tests.faults.worker", str(directory), str(timeout)),
        ]
        with self.output.open("w") as file:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **ENVIRONMENT, **FRESH_STORE, "PYTHONPATH": str(ROOT), **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def kill(self) -> None:
        """As when the node loses its power: the agent and its worker."""
        for pid in [self.process.pid, *descendants(self.process.pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def descendants(pid: int) -> list[int]:
    """Processes that ``pid`` and its children have started."""
    try:
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []
    return children + [one for child in children for one in descendants(child)]


def stories(directory: Path) -> list[Story]:
    """Of all runs so far, in order."""
    return [Story.read(path) for path in sorted(directory.glob("journal *"))]


def wait_until(condition: Callable[[], object], seconds: float, agents: list[Agent]) -> None:
    """Waits; fails with the agents' output."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            outputs = [f"---- {agent.output.name}\n{agent.output.read_text()[-4000:]}" for agent in agents]
            raise AssertionError("\n".join([f"not within {seconds:g} s", *outputs]))
        time.sleep(0.005)


def free_port() -> int:
    """A port on which nobody listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
