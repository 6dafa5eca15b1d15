"""Time of a training step against other ways to train the same model on tp=2. Writes docs/overhead.md.

Every way trains the same Llama on the same batch with SGD, on two ranks of this machine: all in the same pair of
processes, one at a time. After the first steps, in which things are compiled and allocated, they take steps in turn, so
that a slower moment of the machine is everybody's. A time is the median of the steps of the slower rank; a ratio is the
median of the ratios to our step of the same turn, with quartiles: above 1 others take longer. Lightning's own share is
the processor time of our trainer's thread outside of forward pass, backward pass, update and zeroing: its loops and
hooks, and our strategy's look for gradients that are not finite.
"""

import importlib.util
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor

from benchmarks._by_torch import split_by_torch
from benchmarks._measure import between, describe_machine
from benchmarks._nursery import shared_nursery
from benchmarks._overhead_loops import (
    Size,
    by_nemo,
    by_our_loop,
    by_torch_loop,
    by_transformers,
    make_batch,
    make_model,
    make_optimizer,
)
from benchmarks._page import Page, Table
from benchmarks._turns import Turns, in_turn
from lightning_automodel import FSDP2Config, FSDP2TPStrategy
from lightning_automodel.testing.pool import Pool

WIDTHS = ((256, 8), (1024, 4))  # hidden, layers
WARM, STEPS = 2, 5
TARGETS = {256: 1.3, 1024: 1.08}


def main() -> None:
    page = Page("overhead.md", "overhead")
    parser = page.parser(__doc__)
    parser.add_argument("--steps", type=int, default=STEPS, help="of each way, in turn")
    arguments = parser.parse_args()
    widths, tokens, steps = (((64, 2),), 32, 2) if arguments.smoke else (WIDTHS, 256, arguments.steps)
    page.add(describe())
    with shared_nursery() as nursery:
        sizes = [Size(hidden=hidden, layers=layers, tokens=tokens, steps=steps) for hidden, layers in widths]
        page.add(table(Pool(nursery, 2), [*sizes, *(replace(size, compiled=True) for size in sizes)]))
    page.finish(arguments)


def headline(tables: list[Table]) -> str:
    """Say what the page shows, in a sentence."""
    column = tables[0].columns.index("ratio to ours")
    found = [
        f"{row[column]} x at hidden {row[0].partition(' x ')[0]}"
        for row in tables[0].rows
        if row[1] == TORCH and "compiled" not in row[0]
    ]
    own = next(row[2] for row in tables[0].rows if "own share" in row[1])
    return f"a step of torch's styles takes {' and '.join(found)} of ours; Lightning's own share is {own} ms"


def describe() -> Iterator[str]:
    yield "# Time of a step against others"
    yield ""
    yield (__doc__ or "").partition("\n\n")[2].strip()
    yield ""
    nemo = ("nemo-automodel",) if NEMO in WAYS else ()
    yield (
        f"One row of 256 tokens per batch, float32, SGD; {describe_machine(*nemo)}. Milliseconds. Written by "
        "`python -m benchmarks.overhead --write`."
    )
    missing = "nemo-automodel is not installed here and was not measured."
    yield "nemo-automodel is installed without what it pins." if nemo else missing
    yield ""


def table(pool: Pool, sizes: list[Size]) -> Iterator[str]:
    yield "| hidden x layers | way | step | quartiles | ratio to ours | quartiles of the ratio | target |"
    yield "|---|---|---|---|---|---|---|"
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            make_model(size).save_pretrained(folder)
            ranks = pool.run(measure, size, folder, trainer=True, timeout=600)
        slower = max(ranks, key=lambda rank: median(rank[OURS]))
        label = f"{size.hidden} x {size.layers}{', compiled' if size.compiled else ''}"
        for name in (OURS, *others(size)):
            yield f"| {label} | {name} | {cells(slower, name)} | {target(size, name)} |"
        share = median(own / step for own, step in zip(slower[OWN], slower[OURS], strict=True))
        own = f"{median(slower[OWN]):.2f} | {between(slower[OWN], 2)}"
        yield f"| | {OWN} | {own} | {100 * share:.2f} % | | <= 2 % |"


def cells(found: Mapping[str, list[float]], name: str) -> str:
    ratios = [there / ours for there, ours in zip(found[name], found[OURS], strict=True)]
    return f"{median(found[name]):.1f} | {between(found[name], 1)} | {median(ratios):.2f} | {between(ratios, 2)}"


def target(size: Size, name: str) -> str:
    if name in (OURS, LOOP):
        return ""
    return f">= {1.0 if size.compiled else TARGETS.get(size.hidden, 1.0)}"


def others(size: Size) -> dict[str, Callable[[Size, str, Turns], Any]]:
    return {name: way for name, way in WAYS.items() if not size.compiled or name in COMPILED}


# ---- on each rank ----------------------------------------------------------------------------------------------------


def measure(size: Size, folder: str) -> dict[str, list[float]]:
    """Milliseconds of each step of each way, and of Lightning's own share of ours."""
    dist.init_process_group("gloo")
    ours = Module(size)
    ways = {OURS: partial(by_trainer, ours)}
    ways |= {name: partial(way, size, folder) for name, way in others(size).items()}
    seconds = in_turn(ways, make_batch(size), WARM + size.steps)
    steps = [after - before for before, after in pairwise(ours.began)]
    seconds[OWN] = [step - spent for step, spent in zip(steps, ours.spent, strict=False)]
    return {name: [1e3 * second for second in found[WARM:]] for name, found in seconds.items()}


class Module(L.LightningModule):
    """Sums up what each step spends in forward, backward, update and zeroing; the rest is the trainer's."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.model: Any = None
        self.began: list[float] = []
        self.spent: list[float] = []

    def configure_model(self) -> None:
        if self.model is None:
            self.model = make_model(self.size)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.began.append(time.thread_time())
        self.spent.append(0.0)

    @contextmanager
    def watch(self) -> Iterator[None]:
        before = time.thread_time()
        yield
        self.spent[-1] += time.thread_time() - before

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with self.watch():
            return self.model(input_ids=batch, labels=batch).loss

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        with self.watch():
            super().backward(loss, *args, **kwargs)

    def optimizer_zero_grad(self, *args: Any) -> None:
        with self.watch():
            super().optimizer_zero_grad(*args)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = make_optimizer(self)
        update = optimizer.step

        def step(closure: Callable) -> Any:
            loss = closure()
            with self.watch():
                update()
            return loss

        optimizer.step = step  # type: ignore[assignment]
        return optimizer


class HandWritten(Module):
    """For Lightning's own strategy, which leaves the plan to its user."""

    def configure_model(self) -> None:
        if self.model is None:
            mesh = self.device_mesh
            self.model = split_by_torch(make_model(self.size), mesh["tensor_parallel"], mesh["data_parallel"], False)


def by_trainer(module: Module, turns: Turns) -> None:
    fit(module, FSDP2TPStrategy(tp=2, config=FSDP2Config(enable_compile=module.size.compiled)), turns)


def by_lightning(size: Size, folder: str, turns: Turns) -> None:
    fit(HandWritten(size), ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2), turns)


def fit(module: Module, strategy: Any, turns: Turns) -> None:
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    settings: dict[str, Any] = dict.fromkeys(quiet, False)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, use_distributed_sampler=False, **settings
    )
    trainer.fit(module, turns)


OURS, LOOP = "Trainer + FSDP2TPStrategy", "parallelize() in a loop"
TORCH, OWN = "torch's styles + fully_shard in a loop", "Lightning's own share of a step"
WAYS: dict[str, Callable[[Size, str, Turns], Any]] = {
    LOOP: by_our_loop,
    TORCH: by_torch_loop,
    "Trainer + ModelParallelStrategy, same plan": by_lightning,
    "transformers' DistributedConfig in a loop": by_transformers,
}
COMPILED = [LOOP, TORCH]
NEMO = "nemo-automodel's fsdp2_strategy_parallelize in a loop"
if importlib.util.find_spec("nemo_automodel") is not None:
    WAYS[NEMO] = by_nemo
    COMPILED.append(NEMO)

if __name__ == "__main__":
    from benchmarks import overhead  # by its own name: ranks must be able to import what they run

    overhead.main()
