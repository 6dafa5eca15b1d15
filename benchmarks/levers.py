"""What each lever of memory and speed buys, alone and above others: time and memory of a step. Writes docs/levers.md.

Each row trains the same model on the same batch, against the row above it that is called default. All rows of a layout
take steps in turn; time is the median of them, or of their ratios to the default's step of the same turn. Memory is the
peak of all tensors of a step, without the parameters that a rank stores. Collectives are counted as they are
dispatched, with the larger of what goes in and what comes out; an all-reduce moves it twice. Memory and collectives are
the same in every step.

With CUDA devices the rows are those of two GPUs (of one GPU: what one can show), the model is larger and computes in
bfloat16, and ``--write`` writes docs/levers_cuda.md.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaForCausalLM

from benchmarks._ladder import accumulated, switches
from benchmarks._lever_rows import DEVICE, HERE, LADDERS, LEVERS, RANKS, Lever, model_config
from benchmarks._measure import between, describe_machine
from benchmarks._nursery import shared_nursery
from benchmarks._page import Page, Table
from lightning_automodel import FSDP2Config, parallelize
from lightning_automodel.distributed.shards import local_tensor
from lightning_automodel.mesh import DP_REPLICATE, DP_SHARD_CP, TP, axis, build_mesh, resolve_sizes
from lightning_automodel.testing.pool import Pool
from tests.parallel.levers.collectives import Collectives

MIB = 2**20
WARM = 2  # steps of each row before those that are timed


@dataclass(frozen=True)
class Found:
    """What a row took.

    Attributes:
        seconds: of each step, in the order of the rounds.
        peak: of memory, in bytes.
        count: of collectives.
        bytes: that they move.
    """

    seconds: list[float]
    peak: int
    count: int
    bytes: int


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
    smoke = arguments.smoke
    rounds, only = (1, "none") if smoke else (arguments.rounds, arguments.only)
    page.add(describe())
    alone: dict[str, dict[str, Found]] = {}
    above: dict[str, dict[str, Found]] = {}
    with shared_nursery() as nursery:
        for layout in [arguments.ladder] if arguments.ladder else LADDERS:
            rows = {} if arguments.ladder else chosen(layout, only)
            rungs = rungs_of(layout, arguments.upto, smoke)
            if rows or rungs:
                found = measured(Pool(nursery, RANKS), rounds, layout, [*rows.values(), *rungs.values()])
                alone[layout] = dict(zip(rows, found, strict=False))
                above[layout] = dict(zip(rungs, found[len(rows) :], strict=True))
    if not arguments.ladder:
        page.add(table(alone))
    page.add([*LADDER, *ladder_table(above)])
    page.finish(arguments, "", "## When to use them", "", *sentences())


def headline(tables: list[Table]) -> str:
    """Say what the page shows, in a sentence."""
    column = tables[0].columns.index("peak memory")
    memory = {row[1]: row[column] for row in tables[0].rows if row[0] == f"tp={RANKS}"}
    named = {name: ratio for name, ratio in memory.items() if ratio.replace(".", "").isdigit()}
    best = min(named, key=lambda name: float(named[name]))
    return f"the lever that saves most on tp={RANKS}: {best}, {named[best]} of the peak"


def describe() -> Iterator[str]:
    yield "# Levers"
    yield ""
    yield (__doc__ or "").split("\n\n")[1].strip()
    yield ""
    config = model_config()
    devices = "" if DEVICE == "cpu" else f"{RANKS} x {torch.cuda.get_device_name()}, nccl, computed in bfloat16"
    notes = (
        "On GPUs times differ, because a CPU hides no communication behind compute: where there are any, the same "
        "command gives their table, which was not run yet. "
        if DEVICE == "cpu"
        else ""
    )
    yield (
        f"Llama, hidden {config.hidden_size}, {config.num_hidden_layers} layers, vocabulary {config.vocab_size}, a row "
        f"of {HERE.tokens} tokens, float32. {describe_machine(devices=devices)}. Written by `python -m "
        f"benchmarks.levers --write`. {notes}What watches memory and collectives switches compiled blocks off, so "
        "these are not measured for them."
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


def chosen(layout: str, only: str) -> dict[str, Lever]:
    """The rows of a layout's part of the table: defaults, and those whose names contain ``only``."""
    here = {name: lever for name, lever in LEVERS[layout].items() if _is_measured(layout, lever)}
    return {name: lever for name, lever in here.items() if not lever.when or only in name}


def table(found: Mapping[str, Mapping[str, Found]]) -> Iterator[str]:
    """One line per row, by layout: what it takes of the default's, step by step."""
    yield f"| {RANKS} ranks | lever | step time | quartiles | peak memory | collectives | MiB moved |"
    yield "|---|---|---|---|---|---|---|"
    for layout, rows in found.items():
        base = rows["default"]
        for name, row in rows.items():
            seconds, memory = row.seconds, f"{row.peak / base.peak:.2f}"
            if name == "default":
                times = [1e3 * second for second in seconds]
                cells = [f"{median(times):.0f} ms", f"{between(times)} ms", f"{row.peak / MIB:.0f} MiB"]
            else:
                ratios = [here / there for here, there in zip(seconds, base.seconds, strict=True)]
                cells = [f"{median(ratios):.2f}", between(ratios, 2), memory]
            cells += [str(row.count), f"{row.bytes / MIB:.1f}"]
            if LEVERS[layout][name].fields.get("enable_compile"):
                cells[2:] = [memory if DEVICE == "cuda" else "", "", ""]
            yield f"| {layout}={RANKS} | {name} | {' | '.join(cells)} |"


def ladder(layout: str) -> dict[str, Lever]:
    """The rows of a ladder, each with all fields that hold."""
    here = {name: rung for name, rung in LADDERS[layout].items() if _is_measured(layout, rung)}
    fields = accumulated({name: rung.fields for name, rung in here.items()})
    return {name: replace(rung, fields=fields[name]) for name, rung in here.items()}


def rungs_of(layout: str, upto: str, smoke: bool) -> dict[str, Lever]:
    """The rows of a ladder that are measured: all, or a row with the one above it and the first."""
    rows = ladder(layout)
    names = list(rows)
    if not names or not (smoke or upto):
        return rows
    until = names.index(names[-1] if smoke else upto)
    return {names[i]: rows[names[i]] for i in sorted({0, max(until - 1, 0), until})}


def ladder_table(found: Mapping[str, Mapping[str, Found]]) -> Iterator[str]:
    """Compare rows of ladders: a table, and how each row is had again."""
    ratios = "of the row above | of the first"
    yield f"| | step time | quartiles | {ratios} | peak memory | {ratios} |"
    yield "|" + "---|" * 8
    commands: list[str] = []
    for layout, rows in found.items():
        all_rows = ladder(layout)
        names = list(all_rows)
        for name, row in rows.items():
            above = rows.get(names[max(names.index(name) - 1, 0)])
            yield f"| {name} | {compared(row, above, rows[names[0]])} |"
            commands.append(f"- {name}: {reproduced(layout, name, all_rows[name])}")
    yield ""
    yield from commands


def compared(row: Found, above: Found | None, first: Found) -> str:
    """Compare a row of a ladder with two others, as cells."""
    here, top = 1e3 * median(row.seconds), 1e3 * median(first.seconds)
    times = "" if above is None else f"{here / (1e3 * median(above.seconds)):.2f}"
    peaks = "" if above is None else f"{row.peak / above.peak:.2f}"
    cells = [f"{here:.0f} ms", between([1e3 * second for second in row.seconds]), times, f"{here / top:.2f}"]
    return " | ".join([*cells, f"{row.peak / MIB:.0f} MiB", peaks, f"{row.peak / first.peak:.2f}"])


def reproduced(layout: str, name: str, row: Lever) -> str:
    """The commands of a row: what measures it, and what trains so."""
    run = f"lightning-automodel fit --config=run.yaml --trainer.devices={RANKS} --trainer.strategy.{layout}={RANKS}"
    measure_it = f"python -m benchmarks.levers --ladder {layout} --upto '{name}'"
    return f"`{measure_it}`; `{' '.join([run, *switches(row.fields)])}`"


def measured(pool: Pool, rounds: int, layout: str, rows: Sequence[Lever]) -> list[Found]:
    """Run rows, those that are the same once."""
    once = {_key(lever): lever for lever in rows}
    found = pool.run(measure, layout, list(once.values()), rounds, timeout=900, trainer=DEVICE == "cuda")[0]
    by_key = dict(zip(once, found, strict=True))
    return [by_key[_key(lever)] for lever in rows]


def _key(lever: Lever) -> tuple[str, int]:
    return repr(sorted(lever.fields.items())), lever.micro_batches


def measure(layout: str, levers: list[Lever], rounds: int) -> list[Found]:
    """Runs on each rank: the models of all rows, which take steps in turn, so that a slower moment is everybody's."""
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cuda:nccl,cpu:gloo")
    mesh = build_mesh(resolve_sizes(RANKS, **{layout: RANKS}), DEVICE)
    groups = {name: axis(mesh, name).get_group() for name in (DP_REPLICATE, DP_SHARD_CP, TP)}
    models = [make_model(mesh, lever) for lever in levers]
    seconds: list[list[float]] = [[] for _ in levers]
    for _ in range(rounds):
        for model, lever, times in zip(models, levers, seconds, strict=True):
            dist.barrier()
            before = time.perf_counter()
            step(model, lever)
            times.append(time.perf_counter() - before)
    return [watched(*each, groups) for each in zip(models, levers, seconds, strict=True)]


def make_model(mesh: DeviceMesh, lever: Lever) -> Any:
    """Build and split the model of a row, and take the steps that compile and allocate."""
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model: Any = LlamaForCausalLM(model_config())
    parallelize(model, mesh, FSDP2Config(**{**HERE.fields, **lever.fields})).train()
    for _ in range(WARM):
        step(model, lever)
    return model


def watched(model: Any, lever: Lever, seconds: list[float], groups: dict[str, Any]) -> Found:
    """Take two more steps, and watch memory and collectives."""
    peak = peak_of_step(model, lever)
    with Collectives(groups) as collectives:
        step(model, lever)
    moved = sum(n * (2 if "all-reduce" in key else 1) for key, n in collectives.found["bytes"].items())
    return Found(seconds, peak, sum(collectives.found["count"].values()), moved)


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
