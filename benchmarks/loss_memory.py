"""Memory and time of head and loss: plain, cut on the vocabulary, in chunks. Writes docs/loss_memory.md.

Each measurement is a process of its own (one per rank): hidden states, weight and labels are made, then the forward and
backward pass runs once. Memory is the peak above what was held before, so the gradient of the weight counts and the
weight does not: on the CPU of resident memory, on CUDA of allocated memory. Time is that of the process on the CPU (the
machine may be shared), the wall clock on CUDA.
"""

import argparse
import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import date
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import linear, pad
from transformers.loss.loss_utils import ForCausalLMLoss

from benchmarks._measure import forget_peak, status
from benchmarks._page import Page, Table
from lightning_automodel.chunked_loss import chunked_linear_cross_entropy
from lightning_automodel.distributed.collectives import copy_in, shard_bounds
from lightning_automodel.loss.install import causal_lm_loss
from lightning_automodel.loss.sharded_logits import join_shards

GIB = 2**30
VARIANTS = {
    "plain": "transformers' loss of whole logits",
    "whole": "ours, of whole logits",
    "cut": "ours, of logits cut on the vocabulary over 2 ranks",
    "chunked": "ours, in chunks",
    "chunked, cut": "ours, in chunks, the vocabulary cut over 2 ranks",
}
GRIDS = {
    "cpu": [(32_000, 4096), (32_000, 16_384), (32_000, 32_768), (128_000, 4096), (256_000, 2048)],
    "cuda": [(v, t) for v in (32_000, 128_000, 256_000) for t in (8192, 32_768)],
}


@dataclass(frozen=True, kw_only=True)
class Task:
    """One measurement."""

    variant: str
    vocabulary: int
    tokens: int
    hidden: int
    chunk: int
    dtype: str
    device: str

    @property
    def ranks(self) -> int:
        return 2 if "cut" in self.variant else 1


def main() -> None:
    page = Page("loss_memory.md", "loss_memory")
    arguments = parse(page)
    if arguments.one:
        print(json.dumps(measure(Task(**json.loads(arguments.one)))))
        return
    template = Task(
        variant="",
        vocabulary=0,
        tokens=0,
        hidden=arguments.hidden,
        chunk=arguments.chunk,
        dtype=arguments.dtype,
        device=arguments.device,
    )
    page.add([*describe(arguments), ""])
    page.add(rows(template, arguments.memory * GIB, [(512, 64)] if arguments.smoke else GRIDS[arguments.device]))
    page.finish(arguments)


def headline(tables: list[Table]) -> str:
    """Say what the page shows, in a sentence."""
    row = next(row for row in tables[0].rows if row[2] == "GiB per rank" and "(" in row[6])
    return f"{row[1]} tokens and {row[0]} classes: a loss in chunks takes {row[6]} GiB for {row[3]}"


def parse(page: Page) -> argparse.Namespace:
    parser = page.parser(__doc__)
    parser.add_argument("--device", choices=list(GRIDS), default="cpu")
    parser.add_argument("--hidden", type=int, help="width of the model; 512 on cpu, 4096 on cuda")
    parser.add_argument("--dtype", help="float32 on cpu, bfloat16 on cuda")
    parser.add_argument("--chunk", type=int, help="tokens per chunk; 256 on cpu, 1024 on cuda")
    parser.add_argument("--memory", type=float, default=8, help="GiB; what would need more is left out")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    on_cpu = arguments.device == "cpu"
    arguments.hidden = arguments.hidden or (512 if on_cpu else 4096)
    arguments.dtype = arguments.dtype or ("float32" if on_cpu else "bfloat16")
    arguments.chunk = arguments.chunk or (256 if on_cpu else 1024)
    return arguments


def describe(arguments: argparse.Namespace) -> list[str]:
    on_cpu = arguments.device == "cpu"
    machine = f"{platform.machine()}, {os.cpu_count()} cores" if on_cpu else torch.cuda.get_device_name()
    return [
        "# Memory and time of head and loss",
        "",
        (__doc__ or "").partition("\n\n")[2].strip(),
        "",
        f"hidden {arguments.hidden}, {arguments.dtype}, chunks of {arguments.chunk} tokens, {arguments.device} "
        f"({machine}), one thread per rank; torch {torch.__version__}, transformers {transformers.__version__}; "
        f"{date.today()}. Written by `python -m benchmarks.loss_memory --device {arguments.device} --write`.",
        "",
        *(f"- {name}: {meaning}" for name, meaning in VARIANTS.items()),
        "",
        f"`-`: would need more than {arguments.memory:.0f} GiB (or a second GPU). In parentheses: against plain.",
    ]


def rows(template: Task, memory: float, grid: list[tuple[int, int]]) -> Iterator[str]:
    yield "| vocabulary | tokens | | " + " | ".join(VARIANTS) + " |"
    yield "|---" * (3 + len(VARIANTS)) + "|"
    for vocabulary, tokens in grid:
        task = replace(template, vocabulary=vocabulary, tokens=tokens)
        results = [run(replace(task, variant=name), memory) for name in VARIANTS]
        for unit, key in (("GiB per rank", "peak"), ("seconds", "seconds")):
            cells = " | ".join(cell(result, results[0], key) for result in results)
            yield f"| {vocabulary // 1000}k | {tokens} | {unit} | {cells} |"


def cell(result: dict[str, float] | None, plain: dict[str, float] | None, key: str) -> str:
    if result is None:
        return "-"
    value = result[key] / GIB if key == "peak" else result[key]
    if plain is None or plain is result:
        return f"{value:.2f}"
    ratio = result[key] / plain[key]
    return f"{value:.2f} (1/{1 / ratio:.1f})" if key == "peak" else f"{value:.2f} ({ratio:.2f} x)"


def run(task: Task, memory: float) -> dict[str, float] | None:
    """The worst of the ranks, or ``None`` if it is left out."""
    if expected_memory(task) > memory or (task.device == "cuda" and task.ranks > torch.cuda.device_count()):
        return None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(task.ranks)}
    command = [sys.executable, "-m", "benchmarks.loss_memory", "--one", json.dumps(asdict(task))]
    processes = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, env={**os.environ, **shared, "RANK": str(rank), "OMP_NUM_THREADS": "1"}
        )
        for rank in range(task.ranks)
    ]
    answers = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        sys.exit(f"{task} failed")
    results = [json.loads(answer.splitlines()[-1]) for answer in answers]
    return {key: max(result[key] for result in results) for key in results[0]}


def expected_memory(task: Task) -> float:
    """Bytes on all ranks, roughly: in float32 the logits, their logarithms and two gradients."""
    copies = {"plain": 3, "whole": 2, "cut": 2}.get(task.variant, 0)
    return 4.0 * task.vocabulary * (copies * task.tokens + 2 * task.hidden + task.ranks * task.chunk)


# ---- in a process of its own -----------------------------------------------------------------------------------------


def measure(task: Task) -> dict[str, float]:
    torch.set_num_threads(1)
    group = None
    if task.ranks > 1:
        if task.device == "cuda":
            torch.cuda.set_device(int(os.environ["RANK"]))
        dist.init_process_group("nccl" if task.device == "cuda" else "gloo")
        group = dist.group.WORLD
    step(replace(task, tokens=8, vocabulary=64), *inputs(replace(task, tokens=8, vocabulary=64)))  # loads what is lazy
    tensors = inputs(task)
    before = reset_peak(task.device)
    start = clock(task.device)
    step(task, *tensors)
    seconds = clock(task.device) - start
    result = {"peak": float(peak(task.device) - before), "seconds": seconds}
    if group is not None:
        dist.barrier()
        dist.destroy_process_group()
    return result


def inputs(task: Task) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [1, tokens, hidden], this rank's rows of the weight, labels [1, tokens]."""
    dtype, device = getattr(torch, task.dtype), task.device
    rank = int(os.environ.get("RANK", "0"))
    torch.manual_seed(0)
    hidden = torch.randn(1, task.tokens, task.hidden, device=device, dtype=dtype).requires_grad_()
    rows = shard_bounds(task.vocabulary, task.ranks, rank)[1]
    weight = torch.randn(rows, task.hidden, device=device, dtype=dtype).mul_(0.02).requires_grad_()
    return hidden, weight, torch.randint(task.vocabulary, (1, task.tokens), device=device)


def step(task: Task, hidden: Tensor, weight: Tensor, labels: Tensor) -> None:
    group: Any = dist.group.WORLD if task.ranks > 1 else None
    if task.variant.startswith("chunked"):
        targets = pad(labels, (0, 1), value=-100)[:, 1:]
        loss = chunked_linear_cross_entropy(
            hidden.flatten(0, 1),
            weight,
            targets.flatten(),
            chunk_size=task.chunk,
            group=group,
            vocab_size=task.vocabulary,
        )
    elif task.variant == "cut":
        mesh = init_device_mesh(task.device, (task.ranks,))
        loss = causal_lm_loss(join_shards(linear(copy_in(hidden, group), weight), mesh, task.vocabulary), labels)
    else:
        function = causal_lm_loss if task.variant == "whole" else ForCausalLMLoss
        loss = function(linear(hidden, weight), labels, task.vocabulary)
    loss.backward()


def clock(device: str) -> float:
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def reset_peak(device: str) -> int:
    """Forgets the peak; returns what is held."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    forget_peak()
    return status("VmRSS")


def peak(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device == "cuda" else status("VmHWM")


if __name__ == "__main__":
    main()
