"""What each lever of memory and speed buys, alone and above others: time and memory of a step. Writes docs/levers.md.

Each row trains the same model on the same batch, against the row above it that is called default. Time is the median
of alternating runs. Memory is the peak of all tensors of a step, without the parameters that a rank stores. Collectives
are counted as they are dispatched, with the larger of what goes in and what comes out; an all-reduce moves it twice.

With CUDA devices the rows are those of two GPUs (of one GPU: what one can show), the model is larger and computes in
bfloat16, and ``--write`` writes docs/levers_cuda.md.
"""

import os
import platform
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaForCausalLM

from benchmarks._ladder import accumulated, switches
from benchmarks._lever_rows import DEVICE, HERE, LADDERS, LEVERS, RANKS, Lever, model_config
from benchmarks._measure import medians
from benchmarks._page import Page, Table
from lightning_automodel import FSDP2Config, parallelize
from lightning_automodel.distributed.shards import local_tensor
from lightning_automodel.mesh import DP_REPLICATE, DP_SHARD_CP, TP, axis, build_mesh, resolve_sizes
from lightning_automodel.testing.pool import Nursery, Pool
from tests.parallel.levers.collectives import Collectives

MIB = 2**20
WARM = 2
LADDER = (
    "",
    "## The ladder",
    "",
    "Each row has one lever more than the row above it; what it does alone is in the table before. Below: what",
    "measures a row again, beside the two that it is compared with, and what starts a run with its levers.",
    "",
)


def main() -> None:
    page = Page("levers.md" if DEVICE == "cpu" else "levers_cuda.md", "levers")
    parser = page.parser(__doc__, rounds=3)
    parser.add_argument("--only", default="", help="rows whose names contain this, and the defaults")
    parser.add_argument("--ladder", choices=list(LADDERS), help="this ladder, and nothing else of the page")
    parser.add_argument("--upto", default="", help="of that ladder this row only, the one above it and the first")
    arguments = parser.parse_args()
    if arguments.ladder and arguments.write:
        parser.error("--ladder runs a part of the page; leave out --write, or --ladder")
    if arguments.upto and arguments.upto not in LADDERS.get(arguments.ladder, ()):
        parser.error(f"--ladder={arguments.ladder} has no row {arguments.upto!r}; give both, as the page does")
    nursery = Nursery()
    pool, rounds = Pool(nursery, RANKS), 1 if arguments.smoke else arguments.rounds
    page.add(describe())
    try:
        if not arguments.ladder:
            page.add(table(pool, rounds, "none" if arguments.smoke else arguments.only))
        layouts = [arguments.ladder] if arguments.ladder else list(LADDERS)
        page.add(LADDER)
        page.add(ladder_table(pool, rounds, layouts, arguments.upto, arguments.smoke))
    finally:
        nursery.close()
    page.finish(arguments, "", "## When to use them", "", *sentences())


def headline(tables: list[Table]) -> str:
    """Say what the page shows, in a sentence."""
    memory = {row[1]: row[3] for row in tables[0].rows if row[0] == f"tp={RANKS}"}
    named = {name: ratio for name, ratio in memory.items() if ratio.replace(".", "").isdigit()}
    best = min(named, key=lambda name: float(named[name]))
    return f"the lever that saves most on tp={RANKS}: {best}, {named[best]} of the peak"


def describe() -> Iterator[str]:
    yield "# Levers"
    yield ""
    yield (__doc__ or "").split("\n\n")[1].strip()
    yield ""
    config = model_config()
    where = (
        f"{RANKS} ranks with one thread each on CPU ({platform.machine()}, gloo)"
        if DEVICE == "cpu"
        else f"{RANKS} x {torch.cuda.get_device_name()} (nccl), computed in bfloat16"
    )
    notes = (
        "On GPUs times differ, because a CPU hides no communication behind compute: where there are any, the same "
        "command gives their table, which was not run yet. "
        if DEVICE == "cpu"
        else ""
    )
    yield (
        f"Llama, hidden {config.hidden_size}, {config.num_hidden_layers} layers, vocabulary {config.vocab_size}, a row "
        f"of {HERE.tokens} tokens, float32, {where}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}. Written by `python -m benchmarks.levers --write`. {notes}What watches memory and "
        "collectives switches compiled blocks off, so these are not measured for them."
    )
    yield ""


def sentences() -> Iterator[str]:
    for layout, levers in LEVERS.items():
        for name, lever in levers.items():
            if lever.when:
                where = "CPU" if DEVICE == "cpu" else "this machine"
                note = "" if _is_measured(layout, lever) else f" (not measured on {where})"
                yield f"- **{name}**{note}: {lever.when}"


def _is_measured(layout: str, lever: Lever) -> bool:
    if "float8" in lever.fields and DEVICE == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        return False
    return DEVICE in lever.devices and (RANKS == 2 or (layout == "tp" and lever.ranks == 1))


def table(pool: Pool, rounds: int, only: str) -> Iterator[str]:
    yield f"| {RANKS} ranks | lever | step time | peak memory | collectives | MiB moved |"
    yield "|---|---|---|---|---|---|"
    for layout, levers in LEVERS.items():
        here = {name: lever for name, lever in levers.items() if _is_measured(layout, lever)}
        chosen = {name: lever for name, lever in here.items() if not lever.when or only in name}
        found = measured(pool, rounds, layout, chosen)
        if not found:
            continue
        base = medians(found["default"])
        for name, runs in found.items():
            seconds = statistics.median(run["seconds"] for run in runs)
            peak, count, moved = (runs[0][key] for key in ("peak", "count", "bytes"))
            if name == "default":
                cells = f"{1e3 * seconds:.0f} ms | {peak / MIB:.0f} MiB"
            else:
                cells = f"{seconds / base['seconds']:.2f} | {peak / base['peak']:.2f}"
            cells += f" | {count:.0f} | {moved / MIB:.1f}"
            if chosen[name].fields.get("enable_compile"):
                memory = f"{peak / base['peak']:.2f}" if DEVICE == "cuda" else ""
                cells = f"{seconds / base['seconds']:.2f} | {memory} | |"
            yield f"| {layout}={RANKS} | {name} | {cells} |"


def ladder(layout: str) -> dict[str, Lever]:
    """The rows of a ladder, each with all fields that hold."""
    rungs = {name: rung for name, rung in LADDERS[layout].items() if _is_measured(layout, rung)}
    fields = accumulated({name: rung.fields for name, rung in rungs.items()})
    return {name: replace(rung, fields=fields[name]) for name, rung in rungs.items()}


def ladder_table(pool: Pool, rounds: int, layouts: Iterable[str], upto: str, smoke: bool) -> Iterator[str]:
    """Measure ladders: a table, and how each row is had again."""
    yield "| | step time | of the row above | of the first | peak memory | of the row above | of the first |"
    yield "|" + "---|" * 7
    commands: list[str] = []
    for layout in layouts:
        rows = ladder(layout)
        if not rows:
            continue
        names = list(rows)
        until = names.index(names[-1] if smoke else upto) if smoke or upto else None
        chosen = names if until is None else [names[i] for i in sorted({0, max(until - 1, 0), until})]
        found = measured(pool, rounds, layout, {name: rows[name] for name in chosen})
        runs = {name: medians(each) for name, each in found.items()}
        for name, run in runs.items():
            above = runs.get(names[max(names.index(name) - 1, 0)])
            yield f"| {name} | {compared(run, above, runs[names[0]])} |"
            commands.append(f"- {name}: {reproduced(layout, name, rows[name])}")
    yield ""
    yield from commands


def compared(run: Mapping[str, float], above: Mapping[str, float] | None, first: Mapping[str, float]) -> str:
    """Compare a row of a ladder with two others, as cells."""
    cells = []
    for key, unit, word in (("seconds", 1e-3, "ms"), ("peak", MIB, "MiB")):
        ratio = "" if above is None else f"{run[key] / above[key]:.2f}"
        cells += [f"{run[key] / unit:.0f} {word}", ratio, f"{run[key] / first[key]:.2f}"]
    return " | ".join(cells)


def reproduced(layout: str, name: str, row: Lever) -> str:
    """The commands of a row: what measures it, and what trains so."""
    run = f"lightning-automodel fit --config=run.yaml --trainer.devices={RANKS} --trainer.strategy.{layout}={RANKS}"
    measure_it = f"python -m benchmarks.levers --ladder {layout} --upto '{name}'"
    return f"`{measure_it}`; `{' '.join([run, *switches(row.fields)])}`"


def measured(pool: Pool, rounds: int, layout: str, rows: Mapping[str, Lever]) -> dict[str, list[dict[str, float]]]:
    """Run rows in turn, so that a machine that slows down slows all of them."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in rows}
    for _ in range(rounds):
        for name, lever in rows.items():
            found[name].append(pool.run(measure, layout, lever, timeout=600, trainer=DEVICE == "cuda")[0])
    return found


def measure(layout: str, lever: Lever) -> dict[str, float]:
    """Runs on each rank."""
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cuda:nccl,cpu:gloo")
    mesh = build_mesh(resolve_sizes(RANKS, **{layout: RANKS}), DEVICE)
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model: Any = LlamaForCausalLM(model_config())
    parallelize(model, mesh, FSDP2Config(**{**HERE.fields, **lever.fields})).train()
    groups = {name: axis(mesh, name).get_group() for name in (DP_REPLICATE, DP_SHARD_CP, TP)}
    times = []
    for _ in range(WARM + 5):
        dist.barrier()
        before = time.perf_counter()
        step(model, lever)
        times.append(time.perf_counter() - before)
    peak = peak_of_step(model, lever)
    with Collectives(groups) as collectives:
        step(model, lever)
    return {
        "seconds": statistics.median(times[WARM:]),
        "peak": peak,
        "count": sum(collectives.found["count"].values()),
        "bytes": sum(n * (2 if "all-reduce" in key else 1) for key, n in collectives.found["bytes"].items()),
    }


def step(model: Any, lever: Lever) -> None:
    ids = torch.randint(HERE.vocabulary, (1, HERE.tokens), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for i in range(lever.micro_batches):
        last = i == lever.micro_batches - 1
        model.set_requires_gradient_sync(last or not lever.fields.get("defer_fsdp_grad_sync", True))
        model(input_ids=ids, labels=ids).loss.backward()
    model.zero_grad()
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def peak_of_step(model: nn.Module, lever: Lever) -> int:
    """Bytes above what is held between steps: allocated on CUDA; on CPU see :class:`Peak`."""
    if DEVICE == "cpu":
        with Peak(model) as memory:
            step(model, lever)
        return memory.peak
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    step(model, lever)
    return torch.cuda.max_memory_allocated() - held


class Peak(TorchDispatchMode):
    """The most bytes of tensors that are alive at a time inside of this mode, without what a rank stores of ``model``.

    Memory that FSDP2 gathers into is from an earlier step: it is emptied and filled again, so sizes are those of now.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.stored = {local_tensor(p).untyped_storage()._cdata for p in model.parameters()}
        self.alive: dict[int, StorageWeakRef] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs, result)):
            if type(value) is Tensor:
                storage = value.untyped_storage()
                if storage._cdata not in self.stored:
                    self.alive.setdefault(storage._cdata, StorageWeakRef(storage))
        self.peak = max(self.peak, sum(self._bytes()))
        return result

    def _bytes(self) -> Iterator[int]:
        for key, ref in list(self.alive.items()):
            if ref.expired():
                del self.alive[key]
            else:
                yield torch.UntypedStorage._new_with_weak_ptr(ref.cdata).nbytes()


if __name__ == "__main__":
    from benchmarks import levers  # by its own name: ranks must be able to import what they run

    levers.main()
