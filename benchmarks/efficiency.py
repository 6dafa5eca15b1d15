"""How close a step on two ranks is to half of the step of one process, and what the rest is. Writes docs/efficiency.md.

Efficiency is the time of one process with one thread over twice the time on two ranks, for the same rows: of medians,
and of the fastest steps, which a restless machine disturbs least. The time of a rank is what its thread computes and
what it is blocked. Of the first, the share of matrix products (attention among them) is taken from torch's profiler in
steps of their own, and set against half of those of one process; what is beyond is narrower or repeated products. Of
the second, the collectives of the step are run again with nothing between them, all ranks together: that is what their
bytes cost here. The rest is waiting for the other rank. Two processes that each train by themselves at the same moment
share the machine's caches and memory, as ranks do. The limit of a way is the efficiency of a step that takes half the
time of one of those two, and the bytes of the way's collectives: no work of ours, no narrower product and no waiting.
The last table has what FSDP2 sends over gloo beside gloo's own collectives.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks._measure import describe_machine, quartiles
from benchmarks._nursery import shared_nursery
from benchmarks._page import Page, Table
from lightning_automodel import FSDP2Config, parallelize
from lightning_automodel.distributed.pairwise import all_gather, reduce_scatter
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.testing.pool import Pool
from tests.parallel.levers.collectives import Collectives

CASES = ((256, False), (1024, False), (1024, True), (2048, False))  # hidden, compiled blocks
HEADLINE, WIDEST = 1024, 2048  # of the widest two rounds at most: a step takes seconds
LAYERS, ROWS, LENGTH, VOCABULARY = 4, 2, 256, 1024
WARM, PROFILED, REPEATS = 2, 1, 5
SIZES = (1, 8, 48)  # of messages, MiB
COLUMNS = ("", "step", "quartiles", "fastest", "efficiency", "of the fastest", "limit")
COLUMNS += ("half of one process", "more products", "more of the rest", "bytes of collectives", "waiting")
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "scaled_dot_product")


@dataclass(frozen=True)
class Way:
    """Sizes of the mesh, and switches."""

    sizes: dict[str, int]
    fields: dict[str, Any] = field(default_factory=dict)


ONE, BOTH = "one process", "two of these at once"
WAYS = {
    ONE: Way({}),
    BOTH: Way({}),
    "tp=2": Way({"tp": 2}),
    "tp=2, sequence parallelism": Way({"tp": 2}, {"sequence_parallel": True}),
    "dp_shard=2": Way({"dp_shard": 2}),
    "cp=2": Way({"cp": 2}),
}


def main() -> None:
    """Entry point of ``python -m benchmarks.efficiency``."""
    page = Page("efficiency.md", "efficiency")
    arguments = page.parser(__doc__, rounds=3).parse_args()
    cases = ((64, False), (64, True)) if arguments.smoke else CASES
    rounds = 1 if arguments.smoke else arguments.rounds
    page.add(describe())
    with shared_nursery() as nursery:
        pool = Pool(nursery, 2)
        for width, compiled in cases:
            page.add(table(pool, width, rounds if width < WIDEST else min(rounds, 2), compiled))
        page.add(messages(pool, (1,) if arguments.smoke else SIZES))
    page.finish(arguments)


def headline(tables: list[Table]) -> str:
    """Say what the page shows, in a sentence."""
    wide = tables[CASES.index((HEADLINE, False))]
    found = [f"{way} {wide.number(way, 'efficiency'):.2f} of {wide.number(way, 'limit'):.2f}" for way in list(WAYS)[2:]]
    return (
        f"efficiency of two ranks at hidden {HEADLINE}: {', '.join(found)} that shared memory and gloo's bytes "
        f"leave; two processes that know nothing of each other reach {wide.number(BOTH, 'efficiency'):.2f}"
    )


def describe() -> list[str]:
    """Head of the page."""
    return [
        "# Close to half the time of one process",
        "",
        (__doc__ or "").partition("\n\n")[2].strip(),
        "",
        f"Llama, {LAYERS} layers, {ROWS} rows of {LENGTH} tokens in all, float32, SGD; {describe_machine()}. Two "
        "processes hold a model of each way and take a step of each in turn; while one trains by itself, the other "
        "sleeps. Medians and quartiles of steps, of the slower rank; milliseconds. Written by "
        "`python -m benchmarks.efficiency --write`.",
    ]


def table(pool: Pool, width: int, rounds: int, compiled: bool) -> Iterator[str]:
    """One table, line by line."""
    yield from ("", f"## Hidden {width}{', compiled blocks' if compiled else ''}", "")
    yield f"| {' | '.join(COLUMNS)} |"
    yield f"|---|{'---|' * (len(COLUMNS) - 1)}"
    ranks = pool.run(measure, width, rounds, compiled, timeout=900)
    found = {name: {key: max(rank[name][key] for rank in ranks) for key in ranks[0][name]} for name in WAYS}
    for name, here in found.items():
        yield row(name, here, found[ONE], found[BOTH])


def row(name: str, here: dict[str, float], one: dict[str, float], pair: dict[str, float]) -> str:
    """One line of the table, of a way ``here``, beside one process alone and one of two at once."""
    half, share = one["step"] / 2, 1 if name == BOTH else 1 / 2  # of the work of one process
    cells = [f"{here['step']:.0f}", f"{here['low']:.0f} to {here['high']:.0f}", f"{here['fastest']:.0f}"]
    cells += ["" if name == ONE else f"{share * one[key] / here[key]:.2f}" for key in ("step", "fastest")]
    if name in (ONE, BOTH):
        return f"| {name} | {' | '.join([*cells, *[''] * 6])} |"
    products = here["products"] - one["products"] / 2
    rest = (here["computing"] - here["products"]) - (one["step"] - one["products"]) / 2
    waiting = here["step"] - here["computing"] - here["collectives"]
    parts = (half, products, rest, here["collectives"], waiting)
    cells.append(f"{half / (pair['step'] / 2 + here['collectives']):.2f}")
    cells += [f"{part:.0f}" for part in parts]
    return f"| {name} | {' | '.join(cells)} |"


def messages(pool: Pool, sizes: tuple[int, ...]) -> Iterator[str]:
    """What FSDP2's collectives take beside gloo's own, line by line."""
    yield from ("", "## Messages between two ranks, and gloo's own collectives", "")
    yield "| MiB, whole | all-gather of gloo | by messages | reduce-scatter of gloo | by messages |"
    yield "|---|---|---|---|---|"
    for size in sizes:
        cells = pool.run(both, size * 2**20)[0]
        yield f"| {size} | {' | '.join(f'{1e3 * seconds:.1f}' for seconds in cells)} |"


# ---- on each rank ----------------------------------------------------------------------------------------------------


def measure(width: int, rounds: int, compiled: bool) -> dict[str, dict[str, float]]:
    """Milliseconds of each way: of a step, of computing in it, of matrix products in it, of its collectives alone."""
    torch._dynamo.config.recompile_limit = 64  # the models share the code of their blocks, and differ in shapes
    torch._dynamo.config.automatic_dynamic_shapes = False
    takes_part = [name for name in WAYS if name != ONE or dist.get_rank() == 0]
    steps = {name: make_step(width, WAYS[name], compiled) for name in takes_part}
    taken: dict[str, list[tuple[float, float]]] = {name: [(0.0, 0.0)] * (WARM + rounds) for name in WAYS}
    for i in range(WARM + rounds):
        for name in WAYS:
            dist.barrier()
            if name in steps:
                taken[name][i] = timed_twice(steps[name])
    found = {}
    for name in WAYS:
        seconds, computing = zip(*taken[name][WARM:], strict=True)
        low, high = quartiles(seconds)
        parts = {"step": median(seconds), "low": low, "high": high, "fastest": min(seconds)}
        parts["computing"] = median(computing)
        dist.barrier()
        shares = [share_of_products(steps[name]) for _ in range(PROFILED)] if name in steps else [0.0]
        parts["products"] = parts["computing"] * median(shares)
        parts["collectives"] = replayed(steps[name]) if WAYS[name].sizes else 0.0
        found[name] = {part: 1e3 * value for part, value in parts.items()}
    return found


def timed_twice(step: Callable[[], None]) -> tuple[float, float]:
    """Seconds of the clock, and of this thread."""
    before, computed = time.perf_counter(), time.thread_time()
    step()
    return time.perf_counter() - before, time.thread_time() - computed


def share_of_products(step: Callable[[], None]) -> float:
    """Share of what a thread computes in a step that is matrix products."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        _, computing = timed_twice(step)
    events = (event for event in profiler.key_averages() if any(name in event.key for name in _PRODUCTS))
    return sum(event.self_cpu_time_total for event in events) / 1e6 / computing


def make_step(width: int, way: Way, compiled: bool) -> Callable[[], None]:
    """Build the model on its mesh, and a function that takes a step."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=VOCABULARY,
        use_cache=False,
    )
    model: Any = LlamaForCausalLM(config)
    switches = FSDP2Config(enable_compile=compiled, **way.fields)
    if way.sizes:
        model = parallelize(model, build_mesh(resolve_sizes(2, **way.sizes), "cpu"), switches)
    elif compiled:
        for block in model.model.layers:
            block.compile()
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    rows = ROWS // way.sizes.get("dp_shard", 1)
    ids = torch.randint(VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(1))

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class _Sizes(Collectives):
    """Keeps the size of each collective."""

    def __init__(self) -> None:
        super().__init__({})
        self.calls: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.found["bytes"].copy()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        ours = " of ours" if func.namespace == "lightning_automodel" else ""
        for key, size in (self.found["bytes"] - before).items():
            self.calls[key.split()[1] + ours, size] += 1
        return result


def replayed(step: Callable[[], None]) -> float:
    """Seconds of the collectives of a step, run one after the other with nothing between them."""
    with _Sizes() as sizes:
        step()
    return sum(count * median(alone(kind, size) for _ in range(REPEATS)) for (kind, size), count in sizes.calls.items())


def both(size: int) -> list[float]:
    """Seconds of gloo's own and of messages, in the order of the table."""
    kinds = [f"{kind}{way}" for kind in ("all-gather", "reduce-scatter") for way in ("", " of ours")]
    runs = [[alone(kind, size) for kind in kinds] for _ in range(4 * REPEATS)]
    return [median(of_kind) for of_kind in zip(*runs, strict=True)]


def alone(kind: str, size: int) -> float:
    """Seconds of a collective whose larger side has ``size`` bytes."""
    whole = torch.zeros(max(2, size // 4))
    part = torch.zeros(len(whole) // 2)
    calls: dict[str, Callable[[], Any]] = {
        "all-reduce": lambda: dist.all_reduce(whole),
        "all-gather": lambda: dist.all_gather_into_tensor(whole[: 2 * len(part)], part),
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(part, whole[: 2 * len(part)]),
        "all-to-all": lambda: dist.all_to_all_single(torch.empty_like(part), part),
        "all-gather of ours": lambda: all_gather([whole[: 2 * len(part)]], [part], dist.group.WORLD),
        "reduce-scatter of ours": lambda: reduce_scatter([part], [whole[: 2 * len(part)]], dist.group.WORLD),
    }
    dist.barrier()
    before = time.perf_counter()
    calls[kind]()
    return time.perf_counter() - before


if __name__ == "__main__":
    from benchmarks import efficiency  # by its own name: ranks must be able to import what they run

    efficiency.main()
