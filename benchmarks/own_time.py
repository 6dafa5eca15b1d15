"""What a step costs a rank beside computing, over layers and ranks: a line, or a curve? Writes docs/own_time.md.

A narrow Llama (hidden 64, 16 tokens) computes next to nothing. A step of the trainer on a mesh takes a rank's thread
this much processor time more than a step of a plain loop on one process: our hooks, torch's (FSDP2, autograd
functions, collectives called, not waited for), and Lightning's. Processor time is what a thread computes; waiting and
other work on the machine are not in it. A line is fitted over the numbers of layers; the last column is how far the
farthest is off.
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from statistics import linear_regression, median
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks._measure import between, describe_machine
from benchmarks._page import Page, Table
from lightning_automodel import DDPStrategy, FSDP2Config, FSDP2TPStrategy
from lightning_automodel.testing.pool import Nursery, Pool
from tests.support.training import make_trainer

LAYERS, RANKS, AT = (4, 16, 64, 128), (1, 2, 4, 8), 4
WARM, STEPS, LENGTH, VOCABULARY = 1, 5, 16, 64
ONE = "one process, all of it"
WAYS: dict[str, Callable[[int], Strategy]] = {
    "tp": lambda ranks: FSDP2TPStrategy(tp=ranks),
    "tp, sequence parallelism": lambda ranks: FSDP2TPStrategy(tp=ranks, config=FSDP2Config(sequence_parallel=True)),
    "dp_shard": lambda ranks: FSDP2TPStrategy(),
    "DDP": lambda ranks: DDPStrategy(),
}
Found = dict[tuple[str, int, int], list[float]]  # milliseconds of steps, by way, ranks and layers


def main() -> None:
    """Entry point of ``python -m benchmarks.own_time``."""
    page = Page("own_time.md", "own_time")
    arguments = page.parser(__doc__, rounds=1).parse_args()
    layers, ranks, at = ((2, 4), (1, 2), 4) if arguments.smoke else (LAYERS, RANKS, AT)
    page.add(describe())
    nursery = Nursery()
    try:
        found = measured(nursery, layers, ranks, at, 1 if arguments.smoke else arguments.rounds)
    finally:
        nursery.close()
    page.add(over_layers(found, layers))
    page.add(over_ranks(found, at, ranks))
    page.finish(arguments)


def headline(tables: list[Table]) -> str:
    """Say what the page shows, in a sentence."""
    column = "ms per layer"
    found = [f"{way} {tables[0].number(way, column):.2f} ms" for way in ("tp", "dp_shard")]
    return f"beside computing, a layer more costs a rank of two {' or '.join(found)} of processor time per step"


def describe() -> list[str]:
    """Head of the page."""
    return [
        "# What a step costs beside computing",
        "",
        (__doc__ or "").partition("\n\n")[2].strip(),
        "",
        "SGD, float32; milliseconds of the worst rank, medians of steps with their quartiles. "
        f"{describe_machine()}. Written by `python -m benchmarks.own_time --write`.",
    ]


def measured(nursery: Nursery, layers: Sequence[int], ranks: Sequence[int], at: int, rounds: int) -> Found:
    """Run each way on two ranks with each number of layers, and with ``at`` layers on each number of ranks."""
    cases = [(1, [(ONE, count) for count in layers])]
    cases += [(size, [(way, n) for n in (layers if size == 2 else [at]) for way in WAYS]) for size in ranks]
    found: Found = {}
    for _ in range(rounds):
        for size, chosen in cases:
            of_ranks = Pool(nursery, size).run(measure, chosen, size, trainer=True, timeout=600)
            for (way, count), runs in zip(chosen, zip(*of_ranks, strict=True), strict=True):
                found.setdefault((way, size, count), []).extend(1e3 * step for step in max(runs, key=median))
    return found


def over_layers(found: Found, layers: Sequence[int]) -> Iterator[str]:
    """One line per way: two ranks, and each number of layers."""
    yield from ("", "## Over layers, two ranks", "")
    yield f"| | {' | '.join(map(str, layers))} | ms per layer | off the line |"
    yield f"|---|{'---|' * (len(layers) + 2)}"
    yield f"| {ONE} | {' | '.join(cell(found[ONE, 1, count]) for count in layers)} | | |"
    for way in WAYS:
        own = [beside(found, way, 2, count) for count in layers]
        slope, start = linear_regression(layers, [median(steps) for steps in own])
        off = max(abs(start + slope * count - median(steps)) for count, steps in zip(layers, own, strict=True))
        yield f"| {way} | {' | '.join(map(cell, own))} | {slope:.2f} | {off:.1f} |"


def over_ranks(found: Found, layers: int, ranks: Sequence[int]) -> Iterator[str]:
    """One line per way: as many layers, and each number of ranks."""
    yield from ("", f"## Over ranks, {layers} layers", "")
    yield f"| | {' | '.join(map(str, ranks))} |"
    yield f"|---|{'---|' * len(ranks)}"
    for way in WAYS:
        yield f"| {way} | {' | '.join(cell(beside(found, way, count, layers)) for count in ranks)} |"


def beside(found: Found, way: str, ranks: int, layers: int) -> list[float]:
    """Milliseconds of steps, less what one process computes."""
    alone = median(found[ONE, 1, layers])
    return [step - alone for step in found[way, ranks, layers]]


def cell(steps: Sequence[float]) -> str:
    """Median and quartiles."""
    return f"{median(steps):.1f} ({between(steps, 1)})"


# ---- on each rank ----------------------------------------------------------------------------------------------------


def measure(cases: Sequence[tuple[str, int]], ranks: int) -> list[list[float]]:
    """Seconds of this thread in each step, for each way and number of layers."""
    found = []
    for way, layers in cases:
        times = in_a_loop(layers) if way == ONE else in_a_trainer(WAYS[way](ranks), layers)
        found.append([after - before for before, after in pairwise(times)][WARM:])
        gc.collect()  # of the model, at nobody's cost
    return found


def make_model(layers: int) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=VOCABULARY,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def make_batch() -> Tensor:
    return torch.randint(VOCABULARY, (1, LENGTH), generator=torch.Generator().manual_seed(1))


def in_a_loop(layers: int) -> list[float]:
    model, times, ids = make_model(layers).train(), [], make_batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(WARM + STEPS):
        times.append(time.thread_time())
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*times, time.thread_time()]


class Module(L.LightningModule):
    """Notes the processor time of its thread when each step begins."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers, self.model = layers, None
        self.times: list[float] = []

    def configure_model(self) -> None:
        if self.model is None:
            self.model = make_model(self.layers)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.times.append(time.thread_time())

    def on_train_epoch_end(self) -> None:
        self.times.append(time.thread_time())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch, labels=batch).loss  # type: ignore[misc]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def in_a_trainer(strategy: Strategy, layers: int) -> list[float]:
    module = Module(layers)
    trainer = make_trainer(strategy, max_epochs=1, use_distributed_sampler=False)
    trainer.fit(module, DataLoader([make_batch()] * (WARM + STEPS), batch_size=None))  # type: ignore[arg-type]
    return module.times


if __name__ == "__main__":
    from benchmarks import own_time  # by its own name: ranks must be able to import what they run

    own_time.main()
