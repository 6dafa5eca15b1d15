"""What a step costs a rank beside computing, over layers and ranks: a line, or a curve? Writes docs/own_time.md.

A narrow Llama (hidden 64, 16 tokens) computes next to nothing. A step of the trainer on a mesh takes a rank's thread
this much processor time more than a step of a plain loop on one process: our hooks, torch's (FSDP2, autograd
functions, collectives called, not waited for), and Lightning's. Processor time is what a thread computes; waiting and
other work on the machine are not in it. A line is fitted over the numbers of layers; the last column is how far the
farthest is off. The speed of a core changes by a half while this runs, and with it these times; the number of functions
that are called in a step, Python's and built-in ones, does not.
"""

import gc
import sys
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
from benchmarks._nursery import shared_nursery
from benchmarks._page import Page, Table
from lightning_automodel import DDPStrategy, FSDP2Config, FSDP2TPStrategy
from lightning_automodel.testing.pool import Nursery, Pool
from tests.support.training import make_trainer

LAYERS, RANKS, AT = (4, 16, 64, 128), (1, 2, 4, 8), 4
WARM, STEPS, LENGTH, VOCABULARY = 1, 4, 16, 64
ONE = "one process, all of it"
WAYS: dict[str, Callable[[int], Strategy]] = {
    "tp": lambda ranks: FSDP2TPStrategy(tp=ranks),
    "tp, sequence parallelism": lambda ranks: FSDP2TPStrategy(tp=ranks, config=FSDP2Config(sequence_parallel=True)),
    "dp_shard": lambda ranks: FSDP2TPStrategy(),
    "DDP": lambda ranks: DDPStrategy(),
}
Case = tuple[str, int, int]  # way, ranks and layers
Found = dict[Case, list[float]]  # milliseconds of steps


def main() -> None:
    """Entry point of ``python -m benchmarks.own_time``."""
    page = Page("own_time.md", "own_time")
    arguments = page.parser(__doc__, rounds=1).parse_args()
    layers, ranks, at = ((2, 4), (1, 2), 4) if arguments.smoke else (LAYERS, RANKS, AT)
    page.add(describe())
    with shared_nursery() as nursery:
        found, calls = measured(nursery, layers, ranks, at, 1 if arguments.smoke else arguments.rounds)
    page.add(over_layers(found, layers))
    page.add(calls_over_layers(calls, layers))
    page.add(over_ranks(found, at, ranks))
    page.finish(arguments)


def headline(tables: list[Table]) -> str:
    """Say what the page shows, in a sentence."""
    found = [f"{way} {tables[0].number(way, 'ms per layer'):.1f} ms" for way in ("tp", "dp_shard")]
    off = max(tables[1].number(way, "off the line") for way in WAYS)
    return (
        f"beside computing, a layer more costs a rank of two {' or '.join(found)} of processor time per step; 4 to 128 "
        f"layers call functions on a line, at most {off:.0f} off"
    )


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


def measured(
    nursery: Nursery, layers: Sequence[int], ranks: Sequence[int], at: int, rounds: int
) -> tuple[Found, dict[Case, int]]:
    """Run each way on two ranks with each number of layers, and with ``at`` layers on each number of ranks."""
    cases = [(1, [(ONE, count) for count in layers])]
    cases += [(size, [(way, n) for n in (layers if size == 2 else [at]) for way in WAYS]) for size in ranks]
    found: Found = {}
    calls: dict[Case, int] = {}
    for _ in range(rounds):
        for size, chosen in cases:
            of_ranks = Pool(nursery, size).run(measure, chosen, size, trainer=True, timeout=600)
            for (way, count), runs in zip(chosen, zip(*of_ranks, strict=True), strict=True):
                steps, calls[way, size, count] = max(runs, key=lambda run: median(run[0]))
                found.setdefault((way, size, count), []).extend(1e3 * step for step in steps)
    return found, calls


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


def calls_over_layers(calls: dict[Case, int], layers: Sequence[int]) -> Iterator[str]:
    """One line per way: functions called in a step beside those of one process."""
    yield from ("", "## Functions called in a step, two ranks", "")
    yield f"| | {' | '.join(map(str, layers))} | calls per layer | off the line |"
    yield f"|---|{'---|' * (len(layers) + 2)}"
    yield f"| {ONE} | {' | '.join(str(calls[ONE, 1, count]) for count in layers)} | | |"
    for way in WAYS:
        own = [calls[way, 2, count] - calls[ONE, 1, count] for count in layers]
        slope, start = linear_regression(layers, own)
        off = max(abs(start + slope * count - value) for count, value in zip(layers, own, strict=True))
        yield f"| {way} | {' | '.join(map(str, own))} | {slope:.0f} | {off:.0f} |"


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


def measure(cases: Sequence[tuple[str, int]], ranks: int) -> list[tuple[list[float], int]]:
    """Seconds of this thread in each step, and functions that a step calls, for each way and number of layers."""
    found = []
    for way, layers in cases:
        times, calls = in_a_loop(layers) if way == ONE else in_a_trainer(WAYS[way](ranks), layers)
        found.append(([after - before for before, after in pairwise(times)][WARM:], calls.count))
        gc.collect()  # of the model, at nobody's cost
    return found


class Calls:
    """Counts the calls of functions, Python's and built-in ones, between start and stop."""

    def __init__(self) -> None:
        self.count = 0

    def start(self) -> None:
        sys.setprofile(self._called)

    def stop(self) -> None:
        sys.setprofile(None)

    def _called(self, frame: Any, event: str, argument: Any) -> None:
        self.count += event in ("call", "c_call")


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


def in_a_loop(layers: int) -> tuple[list[float], Calls]:
    model, times, ids = make_model(layers).train(), [], make_batch()
    optimizer, calls = torch.optim.SGD(model.parameters(), lr=1e-3), Calls()
    for i in range(WARM + STEPS + 1):
        times.append(time.thread_time())
        if i == WARM + STEPS:
            calls.start()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    calls.stop()
    return times, calls


class Module(L.LightningModule):
    """Notes the processor time of its thread when each step begins, and counts the calls of the last."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers, self.model = layers, None
        self.times: list[float] = []
        self.calls = Calls()

    def configure_model(self) -> None:
        if self.model is None:
            self.model = make_model(self.layers)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.times.append(time.thread_time())
        if batch_idx == WARM + STEPS:
            self.calls.start()

    def on_train_epoch_end(self) -> None:
        self.calls.stop()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch, labels=batch).loss  # type: ignore[misc]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def in_a_trainer(strategy: Strategy, layers: int) -> tuple[list[float], Calls]:
    module = Module(layers)
    trainer = make_trainer(strategy, max_epochs=1, use_distributed_sampler=False)
    trainer.fit(module, DataLoader([make_batch()] * (WARM + STEPS + 1), batch_size=None))  # type: ignore[arg-type]
    return module.times, module.calls


if __name__ == "__main__":
    from benchmarks import own_time  # by its own name: ranks must be able to import what they run

    own_time.main()
