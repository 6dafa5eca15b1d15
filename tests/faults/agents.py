"""Two torchrun agents, and the processes that they start."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lightning_automodel.testing.pool import ENVIRONMENT, ROOT
from tests.faults.chains import Story

# Else the workers of all restarts share one store, and read addresses of dead ones in it (pytorch 135712).
FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@dataclass(frozen=True)
class Node:
    """Where an agent runs: by default on this machine, beside all others.

    Attributes:
        address: its own.
        prefix: what a command is run with.
        interface: of the network.
    """

    address: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()
    interface: str = "lo"


class Agent:
    """``torchrun`` on one of two nodes, with one worker.

    Args:
        directory: for checkpoints, journals and output.
        name: of the file with the output.
        endpoint: of the rendezvous.
        node: where.
        hosts: whether it keeps the rendezvous.
        restarts: how often workers are started again.
        timeout: seconds, of collectives.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        endpoint: str,
        node: Node,
        *,
        hosts: bool = False,
        restarts: int = 3,
        timeout: float = 20,
    ) -> None:
        self.output = directory / f"{name}.txt"
        command = [
            *(*node.prefix, sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"),
            *(f"--max-restarts={restarts}", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=faults"),
            *(f"--rdzv-conf=is_host={int(hosts)}", f"--local-addr={node.address}"),
            *("-m", "tests.faults.worker", str(directory), str(timeout)),
        ]
        environment = {**os.environ, **ENVIRONMENT, **FRESH_STORE, "PYTHONPATH": str(ROOT)}
        with self.output.open("w") as file:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**environment, "GLOO_SOCKET_IFNAME": node.interface},
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
