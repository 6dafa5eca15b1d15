"""The pytest side of the harness: hands calls to the nursery, collects results, reports failures, ends ranks."""

import contextlib
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_automodel.testing.call import MAX_MESSAGE, Call
from lightning_automodel.testing.report import describe_failures, describe_timeout, read_stacks

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "GLOO_SOCKET_IFNAME": "lo",
    # c10d asks for each peer's name, and so a name server for that of ::ffff:127.0.0.1: where one answer in fifty is
    # lost, that is the five seconds of a resolver's attempt.
    "RES_OPTIONS": "timeout:1 attempts:5",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # else who asks for devices begins what a forked rank cannot begin again
}
START_SECONDS = 120.0
GRACE_SECONDS = 0.2


class RankFailed(Exception):
    """A rank raised or died; the message holds the tracebacks and all output.

    Args:
        failures: the traceback, or how the process ended, by rank.
        message: the report.
    """

    def __init__(self, failures: dict[int, str], message: str) -> None:
        super().__init__(message)
        self.failures = failures


class PoolTimeout(Exception):
    """A call passed its deadline; the message holds the Python stacks of all ranks and all output.

    Args:
        stacks: "finished", or the Python stacks at the deadline, by rank.
        message: the report.
    """

    def __init__(self, stacks: dict[int, str], message: str) -> None:
        super().__init__(message)
        self.stacks = stacks


class Nursery:
    """The helper process that forks ranks: started by the first call, and again should it have died."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the nursery

    def start(self) -> None:
        """Starts the helper process, unless it runs already; takes as long as the imports."""
        if self.process is not None and self.process.poll() is None:
            return
        self.close()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(START_SECONDS)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "lightning_automodel.testing.nursery", str(theirs.fileno())],
                cwd=ROOT,
                env=os.environ | ENVIRONMENT,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._receive()

    def fork(self, call: Call) -> tuple[list[int], list[Connection]]:
        """Starts the ranks of `call`; returns their process ids and the connections that will carry their answers."""
        pairs = [Pipe(duplex=False) for _ in range(call.world_size)]
        try:
            pids = self._request(call, [theirs.fileno() for _, theirs in pairs])
        finally:
            for _, theirs in pairs:
                theirs.close()
        return pids, [ours for ours, _ in pairs]

    def end(self, pids: list[int]) -> list[int]:
        """Kills the ranks with all their children; returns their wait statuses.

        Nobody else waits for these processes, so their ids cannot have passed to others.
        """
        for pid in pids:
            for kill in (os.killpg, os.kill):
                with contextlib.suppress(ProcessLookupError):
                    kill(pid, signal.SIGKILL)
        return self._request(pids)

    def close(self) -> None:
        """Ends the helper process."""
        if self.process is not None and self._control is not None:
            self._control.close()
            self.process.kill()
            self.process.wait()
        self.process = self._control = None

    def _request(self, message: Call | list[int], descriptors: list[int] | None = None) -> list[int]:
        assert self._control is not None
        socket.send_fds(self._control, [pickle.dumps(message)], descriptors or [])
        return pickle.loads(self._receive())

    def _receive(self) -> bytes:
        assert self._control is not None
        with contextlib.suppress(ConnectionResetError, TimeoutError):
            if message := self._control.recv(MAX_MESSAGE):
                return message
        self.close()
        self._log.seek(0)
        raise RuntimeError(f"the harness's nursery ended or hangs; its output:\n{self._log.read().decode()}")


class Pool:
    """Runs functions on `world_size` ranks.

    Args:
        nursery: shared by pools of any size.
        world_size: number of ranks of each call.
    """

    def __init__(self, nursery: Nursery, world_size: int) -> None:
        self.nursery = nursery
        self.world_size = world_size

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = 60.0,
        grace: float = GRACE_SECONDS,
        disturb: Callable[[list[int]], None] | None = None,
        trainer: bool = False,
        with_directory: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Calls `function(*args, **kwargs)` on every rank and returns the results, ordered by rank.

        Args:
            function: defined at the top level of an importable module.
            args: pickled; every rank gets a copy.
            timeout: seconds for the call; the imports before the first one do not count.
            grace: seconds that the other ranks have to answer or fail by themselves, once one has failed.
            disturb: called meanwhile, in a thread, with the process ids of the ranks; the call waits for its end.
            trainer: do not initialize torch.distributed; look like a process that torchrun started.
            with_directory: pass `directory=`, an empty `Path` that the ranks of this call share.
            kwargs: pickled as well.

        Raises:
            RankFailed: a rank raised or died.
            PoolTimeout: the deadline passed.
        """
        directory = Path(tempfile.mkdtemp(prefix="ranks-"))
        try:
            if with_directory:
                kwargs["directory"] = directory / "shared"
                kwargs["directory"].mkdir()
            self.nursery.start()
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            call = Call(
                world_size=self.world_size,
                port=store.port,
                directory=directory,
                deadline=time.monotonic() + timeout,
                trainer=trainer,
            )
            call.payload().write_bytes(pickle.dumps((function, args, kwargs)))
            return self._run(call, timeout, grace, disturb)
        finally:
            shutil.rmtree(directory)

    def _run(self, call: Call, timeout: float, grace: float, disturb: Callable[[list[int]], None] | None) -> list[Any]:
        pids, connections = self.nursery.fork(call)
        disturbance = threading.Thread(target=disturb, args=(pids,)) if disturb else None
        if disturbance is not None:
            disturbance.start()
        results: dict[int, Any] = {}
        failures: dict[int, str | None] = {}
        try:
            _collect(connections, call.deadline, grace, results, failures)
            late = not failures and len(results) < call.world_size
            stacks = read_stacks(call, finished=results.keys()) if late else {}
        finally:
            if disturbance is not None:
                disturbance.join()
            statuses = self.nursery.end(pids)
            for connection in connections:
                connection.close()
        if failures:
            known = {rank: text or _describe_status(statuses[rank]) for rank, text in failures.items()}
            raise RankFailed(known, describe_failures(call, known))
        if late:
            raise PoolTimeout(stacks, describe_timeout(call, timeout, results.keys(), stacks))
        return [results[rank] for rank in range(call.world_size)]


def _collect(
    connections: list[Connection],
    deadline: float,
    grace: float,
    results: dict[int, Any],
    failures: dict[int, str | None],
) -> None:
    """Fills in what each rank answers, until all have, one has failed, or the deadline has passed."""
    pending = {connection: rank for rank, connection in enumerate(connections)}
    while pending:
        seconds = max(deadline - time.monotonic(), 0)
        ready = wait(list(pending), min(seconds, grace) if failures else seconds)
        if not ready:
            return
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = pending.pop(connection)
            try:
                succeeded, value = pickle.loads(connection.recv_bytes())
            except EOFError:
                succeeded, value = False, None
            (results if succeeded else failures)[rank] = value


def _describe_status(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return f"ended by {signal.Signals(-code).name} without an answer\n"
    return f"exited with status {code} without an answer\n"
