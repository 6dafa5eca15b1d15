"""Memory, bytes and time of from_pretrained: sharded while loading on 4 ranks; beside other libraries on 2.

Writes docs/loading.md.
"""

import importlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from benchmarks import _peer_loads
from benchmarks._attempts import by_nemo, in_a_line, on_ranks, versions_of_nemo
from benchmarks._measure import Memory, describe_machine, medians
from benchmarks._model_on_disk import GB, write_model
from benchmarks._nursery import shared_nursery
from benchmarks._page import Page, Table
from benchmarks._peer_loads import DDP, NEMO, SPLIT, WAYS
from benchmarks._peer_loads import OURS as OUR_WAY
from lightning_automodel.config import MegatronFSDPConfig
from lightning_automodel.distributed.shards import local_tensor
from lightning_automodel.loading import sharded_loading
from lightning_automodel.mesh import DP_SHARD, TP, Axes, axis, build_mesh, resolve_sizes
from lightning_automodel.parallel.megatron_fsdp import building
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.testing.pool import Nursery, Pool
from tests.support import cuda_on_cpu

RANKS = 4
SMOKE_WAYS = [OUR_WAY, SPLIT]  # the last one fails here


def main() -> None:
    """Entry point."""
    page = Page("loading.md", "load", keeps_sections=True)
    parser = page.parser(__doc__, rounds=2)
    parser.add_argument("--layers", type=int, default=8, help="47 million parameters each, beside 131 million")
    options = parser.parse_args()
    layers, repetitions = (1, 1) if options.smoke else (options.layers, options.rounds)
    task = importlib.import_module("benchmarks.load").measure  # ranks cannot import __main__
    with shared_nursery() as nursery, tempfile.TemporaryDirectory() as directory:
        size = write_model(Path(directory), layers)
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
        for _ in range(repetitions):
            for name in VARIANTS:
                ranks = Pool(nursery, RANKS).run(task, directory, name, timeout=300)
                rounds[name].append({key: max(rank[key] for rank in ranks) for key in ranks[0]})
        page.add(lines(size, rounds))
        page.add(beside_others(nursery, directory, SMOKE_WAYS if options.smoke else list(WAYS), -(-repetitions // 2)))
    page.finish(options)


def headline(tables: list[Table]) -> str:
    """Say what the page shows, in a sentence."""
    ours, theirs = tables[0].rows[0][0], tables[0].rows[-1][0]
    resident, seconds = (
        [tables[0].number(name, column) for name in (ours, theirs)]
        for column in ("resident / (share + largest)", "seconds")
    )
    return (
        f"a rank's resident memory while it loads: {resident[0]:.2f} of its share and the largest tensor, "
        f"{resident[1]:.2f} where every rank loads first; in {seconds[0] / seconds[1]:.2f} of the time"
    )


def measure(directory: str, variant: str) -> dict[str, float]:
    """On one rank, in bytes and seconds."""
    read = count_bytes()
    dist.barrier()
    before = time.process_time()
    with Memory().measured() as memory:
        model = VARIANTS[variant](directory)
        for parameter in model.parameters():
            local_tensor(parameter).add_(0)  # until it is written to, a tensor on the CPU may be a view of the file
        processor = time.process_time() - before
        dist.barrier()
    parts = [local_tensor(parameter).nbytes for parameter in model.parameters()]
    whole = [p.numel() * p.element_size() for p in model.parameters()]
    return {
        "seconds": memory.seconds,
        "processor": processor,
        "own": memory.own,
        "resident": memory.resident,
        "bytes": read() or sum(whole),
        "share": sum(parts),
        "largest": max(whole),
    }


def load_sharded(directory: str, **sizes: int) -> torch.nn.Module:
    """As under FSDP2TPStrategy."""
    mesh = build_mesh(resolve_sizes(RANKS, **sizes), "cpu")
    with sharded_loading(lambda model: parallelize(model, mesh), torch.device("cpu")):
        return AutoModelForCausalLM.from_pretrained(directory)


def load_for_megatron(directory: str, tp: int) -> torch.nn.Module:
    """As under MegatronFSDPStrategy: the library shards what has its values."""
    from lightning_automodel.parallel.megatron_fsdp.sharded import ShardedModules

    cuda_on_cpu.install()
    mesh = build_mesh(resolve_sizes(RANKS, tp=tp), "cpu")
    tp_mesh, config, dtypes = axis(mesh, TP), MegatronFSDPConfig(), building.Dtypes(main=None)
    axes = Axes(tp=tp_mesh, data=axis(mesh, DP_SHARD))
    with sharded_loading(lambda model: building.split_over_tp(model, axes, config), torch.device("cpu")):
        model = AutoModelForCausalLM.from_pretrained(directory)
    building.finish_split(model, tp_mesh, dtypes)
    ShardedModules([model], axis(mesh, DP_SHARD), tp_mesh, config, dtypes, torch.device("cpu"))
    return model


def load_then_shard(directory: str) -> torch.nn.Module:
    """As one would by hand, for example in ``configure_model`` under Lightning's ``ModelParallelStrategy``."""
    model = AutoModelForCausalLM.from_pretrained(directory)
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return model


VARIANTS: dict[str, Callable[[str], torch.nn.Module]] = {
    "FSDP2, dp_shard=4": load_sharded,
    "FSDP2, dp_shard=2 x tp=2": partial(load_sharded, tp=2),
    "Megatron-FSDP, dp=4": partial(load_for_megatron, tp=1),
    "Megatron-FSDP, dp=2 x tp=2": partial(load_for_megatron, tp=2),
    "loaded by every rank, then fully_shard": load_then_shard,
}


def count_bytes() -> Callable[[], int]:
    """Counts, from now on, the bytes that this rank reads from files by slices."""
    total = 0
    original = os.preadv

    def counted(*args: Any) -> int:
        nonlocal total
        count = original(*args)
        total += count
        return count

    os.preadv = counted
    return lambda: total


def lines(size: int, rounds: dict[str, list[dict[str, float]]]) -> list[str]:
    """The document."""
    result = [
        "# What loading costs",
        "",
        f"`python -m benchmarks.load --write` ({describe_machine()}).",
        "",
        f"`from_pretrained` of a Llama of {size / GB:.2f} GB (bf16, safetensors, in the page cache) on {RANKS} ranks,",
        "and a write to every weight. Medians over rounds of the worst rank. Memory is above what the process held",
        "before: own memory is what no file backs; resident memory also counts pages of mapped files.",
        "Megatron-FSDP shards parameters that have their values: a rank reads its slices of tp, and keeps its share of",
        "them afterwards.",
        "",
        "| | seconds | of the processor | own memory, peak | resident, peak | resident / (share + largest) | "
        "bytes read / share |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, values in rounds.items():
        cell = medians(values)
        bound = cell["share"] + cell["largest"]
        result.append(
            f"| {name} | {cell['seconds']:.2f} | {cell['processor']:.2f} | {cell['own'] / GB:.3f} GB | "
            f"{cell['resident'] / GB:.3f} GB | "
            f"{cell['resident'] / bound:.2f} | {cell['bytes'] / cell['share']:.2f} |"
        )
    return result


def beside_others(nursery: Nursery, directory: str, ways: list[str], repetitions: int) -> Iterator[str]:
    """Second table, line by line: the same files into two ranks, by other libraries."""
    pins = versions_of_nemo()
    yield from (
        "",
        f"Beside other libraries: the same files into {_peer_loads.RANKS} ranks, each library as its documentation",
        f"shows (accelerate runs DDP on CPU: all weights on every rank); rounds: {repetitions}.",
        f"nemo-automodel runs in an environment of its own, which `make venv-nemo` makes{f': {pins}' if pins else ''}.",
        "",
        "| | layout | seconds | own memory, peak | resident, peak | a rank's weights |",
        "|---|---|---|---|---|---|",
    )
    for layout, tp in {"dp=2": 1, "tp=2": 2}.items():
        found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways if tp == 1 or way != DDP}
        for _ in range(repetitions):
            for way, runs in found.items():
                if not any("error" in run for run in runs):
                    runs.append(load_by(nursery, way, tp, directory))
        for way, runs in found.items():
            yield f"| {way} | {layout} | {cells(runs)} |"


def load_by(nursery: Nursery, way: str, tp: int, directory: str) -> dict[str, Any]:
    """The worst of the ranks, or the error."""
    if way == NEMO:
        return by_nemo("benchmarks._peer_loads", way, str(tp), directory)
    ranks = on_ranks(Pool(nursery, _peer_loads.RANKS), _peer_loads.measure, way, tp, directory)
    return ranks[0] if "error" in ranks[0] else {key: max(rank[key] for rank in ranks) for key in ranks[0]}


def cells(runs: list[dict[str, Any]]) -> str:
    """What one way of a layout took, or its error."""
    if error := next((run["error"] for run in runs if "error" in run), None):
        return f"{in_a_line(error)} | | |"
    found = medians(runs)
    sizes = (f"{found[key] / GB:.3f} GB" for key in ("own", "resident", "share"))
    return f"{found['seconds']:.2f} | {' | '.join(sizes)}"


if __name__ == "__main__":
    main()
