"""Time of a training step against other ways to train the same model on tp=2. Writes docs/overhead.md.

Every way trains the same Llama on the same batch with SGD, on two ranks of this machine. A run is a fresh pair of
processes; runs of all ways alternate, and the median over the runs of each run's median step counts. The first steps of
a run are left out. A ratio above 1 means that others take longer. Lightning's own share is what a step of the trainer
spends outside of forward pass, backward pass, update and zeroing, measured inside of one run.
"""

import importlib.metadata
import importlib.util
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import lightning as L
import torch
import transformers
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks._by_torch import split_by_torch
from benchmarks._overhead_loops import (
    WARM,
    Size,
    by_nemo,
    by_our_loop,
    by_torch_loop,
    by_transformers,
    make_batch,
    make_model,
    make_optimizer,
    per_step,
)
from benchmarks._page import Page, Table
from lightning_automodel import FSDP2Config, FSDP2TPStrategy
from lightning_automodel.testing.pool import Nursery, Pool

SIZES = (Size(hidden=256, layers=8, tokens=256, steps=23), Size(hidden=1024, layers=4, tokens=256, steps=13))
TARGETS = {256: 1.3, 1024: 1.08}


def main() -> None:
    page = Page("overhead.md", "overhead")
    parser = page.parser(__doc__, rounds=5)
    parser.add_argument("--compile", action="store_true", help="also with compiled blocks")
    arguments = parser.parse_args()
    sizes = [Size(hidden=64, layers=2, tokens=32, steps=WARM + 2)] if arguments.smoke else list(SIZES)
    if arguments.compile:
        sizes += [Size(**{**vars(size), "compiled": True}) for size in sizes]
    page.add(describe())
    nursery = Nursery()
    try:
        page.add(table(Pool(nursery, 2), sizes, 1 if arguments.smoke else arguments.rounds))
    finally:
        nursery.close()
    page.finish(arguments)


def headline(tables: list[Table]) -> str:
    """Say what the page shows, in a sentence."""
    found = []
    for size in SIZES:
        label = f"{size.hidden} x {size.layers}"
        found.append(f"{tables[0].number(f'{label} | {TORCH}', 'ratio to ours'):.2f} x at hidden {size.hidden}")
    own = next(row[2] for row in tables[0].rows if "own share" in row[1])
    return f"a step of torch's styles takes {' and '.join(found)} of ours; Lightning's own share is {own} ms"


def describe() -> Iterator[str]:
    yield "# Time of a step against others"
    yield ""
    yield (__doc__ or "").partition("\n\n")[2].strip()
    yield ""
    yield (
        f"One row per batch, float32, SGD, 2 ranks with one thread each on CPU ({platform.machine()}), torch "
        f"{torch.__version__}, lightning {L.__version__}, transformers {transformers.__version__}. Written by "
        "`python -m benchmarks.overhead --compile --write`."
    )
    if NEMO in WAYS:
        yield f"nemo-automodel {importlib.metadata.version('nemo-automodel')}, installed without what it pins."
    else:
        yield "nemo-automodel is not installed here and was not measured."
    yield ""


def table(pool: Pool, sizes: list[Size], rounds: int) -> Iterator[str]:
    yield "| hidden x layers | way | ms per step | ratio to ours | target |"
    yield "|---|---|---|---|---|"
    for size in sizes:
        ways = {name: way for name, way in WAYS.items() if not size.compiled or name in COMPILED}
        found = medians_of(pool, size, ways, rounds)
        ours = found[OURS]
        for name, seconds in found.items():
            label = f"{size.hidden} x {size.layers}{', compiled' if size.compiled else ''}"
            target = "" if name in (OURS, LOOP) else f">= {1.0 if size.compiled else TARGETS.get(size.hidden, 1.0)}"
            yield f"| {label} | {name} | {1e3 * seconds:.1f} | {seconds / ours:.2f} | {target} |"
        runs = [pool.run(lightnings_own, size, trainer=True, timeout=600) for _ in range(rounds)]
        own, share = (statistics.median(max(rank[i] for rank in ranks) for ranks in runs) for i in range(2))
        yield f"| | Lightning's own share of a step | {1e3 * own:.2f} | {100 * share:.2f} % | <= 2 % |"


def medians_of(pool: Pool, size: Size, ways: dict[str, Callable], rounds: int) -> dict[str, float]:
    runs: dict[str, list[float]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory() as folder:
        make_model(size).save_pretrained(folder)
        for _ in range(rounds):
            for name, way in ways.items():
                seconds = pool.run(way, size, folder, trainer=name in TRAINERS, timeout=600)
                runs[name].append(max(seconds))
    return {name: statistics.median(values) for name, values in runs.items()}


# ---- ways, each returns seconds per step -----------------------------------------------------------------------------


class Module(L.LightningModule):
    """Notes when each step of the trainer begins."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.model: Any = None
        self.times: list[float] = []

    def configure_model(self) -> None:
        if self.model is None:
            self.model = make_model(self.size)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.times.append(time.perf_counter())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self)


class Timed(Module):
    """Sums up what steps spend in forward, backward, update and zeroing; the rest is Lightning's and the strategy's."""

    def __init__(self, size: Size) -> None:
        super().__init__(size)
        self.spent = 0.0
        self.sums: list[float] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self.sums.append(self.spent)

    @contextmanager
    def watch(self) -> Iterator[None]:
        before = time.perf_counter()
        yield
        self.spent += time.perf_counter() - before

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with self.watch():
            return super().training_step(batch, batch_idx)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        with self.watch():
            super().backward(loss, *args, **kwargs)

    def optimizer_zero_grad(self, *args: Any) -> None:
        with self.watch():
            super().optimizer_zero_grad(*args)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = super().configure_optimizers()
        update = optimizer.step

        def step(closure: Callable) -> Any:
            loss = closure()
            with self.watch():
                update()
            return loss

        optimizer.step = step  # type: ignore[assignment]
        return optimizer


def lightnings_own(size: Size) -> tuple[float, float]:
    """Seconds per step outside of forward, backward, update and zeroing, and their share of a step: medians."""
    module = Timed(size)
    fit(module, FSDP2TPStrategy(tp=2, config=FSDP2Config(enable_compile=size.compiled)))
    steps = [after - before for before, after in pairwise(module.times)][WARM:]
    work = [after - before for before, after in pairwise(module.sums)][WARM:]
    own = [step - spent for step, spent in zip(steps, work, strict=True)]
    return statistics.median(own), statistics.median(o / step for o, step in zip(own, steps, strict=True))


class HandWritten(Module):
    """For Lightning's own strategy, which leaves the plan to its user."""

    def configure_model(self) -> None:
        if self.model is None:
            mesh = self.device_mesh
            self.model = split_by_torch(make_model(self.size), mesh["tensor_parallel"], mesh["data_parallel"], False)


def by_trainer(size: Size, folder: str) -> float:
    config = FSDP2Config(enable_compile=size.compiled)
    return fit(Module(size), FSDP2TPStrategy(tp=2, config=config))


def by_lightning(size: Size, folder: str) -> float:
    return fit(HandWritten(size), ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=2))


def fit(module: Module, strategy: Any) -> float:
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    settings: dict[str, Any] = dict.fromkeys(quiet, False)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, use_distributed_sampler=False, **settings
    )
    batch = make_batch(module.size)
    trainer.fit(module, DataLoader([batch] * (module.size.steps + 1), batch_size=None))  # type: ignore[arg-type]
    return per_step(module.times)


OURS, LOOP = "Trainer + FSDP2TPStrategy", "parallelize() in a loop"
TORCH = "torch's styles + fully_shard in a loop"
WAYS: dict[str, Callable[[Size, str], float]] = {
    OURS: by_trainer,
    LOOP: by_our_loop,
    TORCH: by_torch_loop,
    "Trainer + ModelParallelStrategy, same plan": by_lightning,
    "transformers' DistributedConfig in a loop": by_transformers,
}
TRAINERS = (OURS, "Trainer + ModelParallelStrategy, same plan", "transformers' DistributedConfig in a loop")
COMPILED = [OURS, LOOP, TORCH]
NEMO = "nemo-automodel's fsdp2_strategy_parallelize in a loop"
if importlib.util.find_spec("nemo_automodel") is not None:
    WAYS[NEMO] = by_nemo
    COMPILED.append(NEMO)

if __name__ == "__main__":
    from benchmarks import overhead  # by its own name: ranks must be able to import what they run

    overhead.main()
