"""Runs in one forked process: becomes a rank, calls the function, answers, waits for its end."""

import ctypes
import faulthandler
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only

from lightning_automodel._compat.torch.gloo import gloo_in_order
from lightning_automodel.testing.call import Call

COLLECTIVE_TIMEOUT = timedelta(seconds=60)
PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


def run_rank(call: Call, rank: int, answer: Connection, nursery_pid: int) -> None:
    """Calls the function as `rank` and sends `(succeeded, result or traceback)`; never returns."""
    os.setsid()  # the pool ends the whole group, data loader workers and compiler processes included
    _die_with(nursery_pid)
    _redirect_output(call.output(rank))
    stacks = call.stacks(rank).open("w")
    faulthandler.enable()
    # A watchdog and not a signal: Lightning resets every signal handler when a Trainer ends.
    faulthandler.dump_traceback_later(max(call.deadline - time.monotonic(), 0.01), file=stacks)
    _become_rank(call, rank)
    message = _answer(call)
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.flush()
    sys.stderr.flush()
    answer.send_bytes(message)
    # To leave now would close connections that slower ranks still use. The pool ends all ranks together.
    threading.Event().wait()


def execute_rank(call: Call, rank: int, pipe: int, nursery_pid: int) -> None:
    """Runs :func:`run_rank` in a process that imports everything anew, in the place of this one."""
    os.set_inheritable(pipe, True)
    task = pickle.dumps((call, rank, pipe, nursery_pid)).hex()
    os.execv(sys.executable, [sys.executable, "-m", __name__, task])


def _answer(call: Call) -> bytes:
    try:
        function, args, kwargs = pickle.loads(call.payload().read_bytes())
        if not call.trainer:
            with gloo_in_order():
                dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
        return pickle.dumps((True, function(*args, **kwargs)))
    except BaseException:
        return pickle.dumps((False, traceback.format_exc()))


def _die_with(nursery_pid: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != nursery_pid:
        os._exit(1)


def _redirect_output(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a rank that hangs shows what it printed


def _become_rank(call: Call, rank: int) -> None:
    # What torchrun sets; "agent store" means that the pool hosts the rendezvous, so no rank has to find a free port.
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(call.port),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        ROLE_RANK=str(rank),
        WORLD_SIZE=str(call.world_size),
        LOCAL_WORLD_SIZE=str(call.world_size),
        GROUP_WORLD_SIZE="1",
        TORCHELASTIC_RUN_ID="tests",
        TORCHELASTIC_RESTART_COUNT="0",
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    # Read from the environment at import time, when there was no rank yet.
    rank_zero_only.rank = rank  # type: ignore[attr-defined]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


if __name__ == "__main__":
    call, rank, pipe, nursery_pid = pickle.loads(bytes.fromhex(sys.argv[1]))
    run_rank(call, rank, Connection(pipe), nursery_pid)
