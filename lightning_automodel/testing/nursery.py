"""A process that imports the heavy packages once and forks the ranks of each call; started by `pool.Pool`."""

import contextlib
import gc
import importlib
import os
import pickle
import socket
import sys
import traceback
from importlib.util import find_spec
from multiprocessing.connection import Connection

import torch

from lightning_automodel.testing.call import MAX_MESSAGE, MAX_RANKS, Call
from lightning_automodel.testing.rank import execute_rank, run_rank

PRELOAD = (
    "lightning.pytorch",
    "lightning_automodel",
    "pytest",
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torchmetrics",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
)
PRELOAD_IF_INSTALLED = ("s3fs",)  # Lightning's ModelCheckpoint imports it wherever it writes


def main(descriptor: int) -> None:
    """Serves requests on the inherited socket until its other end is closed.

    A `Call`, with one pipe per rank, is answered with the ranks' process ids; a list of process ids that have been
    killed is answered with their wait statuses.
    """
    control = socket.socket(fileno=descriptor)
    gc.disable()  # nothing of what is imported is garbage
    for name in (*PRELOAD, *filter(find_spec, PRELOAD_IF_INSTALLED)):
        importlib.import_module(name)
    gc.enable()
    control.send(b"ready")
    while True:
        message, pipes, _, _ = socket.recv_fds(control, MAX_MESSAGE, MAX_RANKS)
        if not message:
            return
        request = pickle.loads(message)
        if isinstance(request, Call):
            _import_what_it_names(request)
            reply = [_fork(request, rank, pipes, control) for rank in range(request.world_size)]
            for pipe in pipes:
                os.close(pipe)
        else:
            reply = [os.waitpid(pid, 0)[1] for pid in request]
        control.send(pickle.dumps(reply))


def _import_what_it_names(call: Call) -> None:
    """Import the modules of a call once, for its ranks and all later ones."""
    with contextlib.suppress(Exception):  # the ranks meet it again, and say it
        pickle.loads(call.payload().read_bytes())
    gc.collect()
    gc.freeze()  # else a rank's first garbage collection would copy the pages that all of them share


def _fork(call: Call, rank: int, pipes: list[int], control: socket.socket) -> int:
    nursery_pid, anew = os.getpid(), torch.cuda.is_initialized()  # by something that was imported
    pid = os.fork()
    if pid:
        return pid
    try:
        control.close()
        for pipe in set(pipes) - {pipes[rank]}:
            os.close(pipe)
        if anew:  # what has begun CUDA cannot be used behind a fork
            execute_rank(call, rank, pipes[rank], nursery_pid)
        run_rank(call, rank, Connection(pipes[rank]), nursery_pid)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
