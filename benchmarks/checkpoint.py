"""Time and memory of saving and resuming on 4 ranks: ours, and Lightning's ModelParallelStrategy.

Writes docs/checkpoint_times.md.
"""

import importlib
import os
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaForCausalLM

from benchmarks._measure import Memory, between, describe_machine, timed
from benchmarks._model_on_disk import config
from benchmarks._nursery import shared_nursery
from benchmarks._page import Page, Table
from lightning_automodel import FSDP2TPStrategy
from lightning_automodel.distributed.shards import local_tensor
from lightning_automodel.testing.pool import Pool

RANKS, VOCABULARY = 4, 8192
VARIANTS = (
    "ours, dp_shard=4",
    "ours, dp_shard=2 x tp=2",
    "ours, in the background",
    "Lightning's ModelParallelStrategy",
)
COLUMNS = {
    "save": "a save, seconds",
    "blocked": "training waits, seconds",
    "save_memory": "peak memory of it / shards",
    "resume": "resume, seconds",
    "resume_memory": "peak memory of it / (shards + largest tensor)",
}
TIMES = ("save", "blocked", "resume")


class Module(L.LightningModule):
    """Weights and the moments of AdamW in bfloat16."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = layers
        self.model: Any = None

    def configure_model(self) -> None:
        """On the meta device, as its strategy then wants it."""
        if self.model is not None:
            return
        with torch.device("meta"):
            self.model = make_model(self.layers).to(torch.bfloat16)
        if isinstance(self.trainer.strategy, ModelParallelStrategy) and not isinstance(
            self.trainer.strategy, FSDP2TPStrategy
        ):
            for block in self.model.model.layers:
                fully_shard(block)
            fully_shard(self.model)
            self.model.to_empty(device="cpu")
            self.model.init_weights()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The smallest step that gives every weight a gradient."""
        return self.model(input_ids=batch[0], labels=batch[0]).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Two moments per weight."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4, foreach=False)


def make_model(layers: int) -> LlamaForCausalLM:
    """That of loading, with a smaller vocabulary: every rank draws all initial weights, which is not what is timed."""
    sizes = config(layers)
    sizes.vocab_size = VOCABULARY
    return LlamaForCausalLM(sizes)


def main() -> None:
    """Entry point."""
    page = Page("checkpoint_times.md", "checkpoint")
    parser = page.parser(__doc__, rounds=2)
    parser.add_argument("--layers", type=int, default=2, help="47 million parameters each, beside 34 million")
    options = parser.parse_args()
    layers, repetitions = (1, 1) if options.smoke else (options.layers, options.rounds)
    task = importlib.import_module("benchmarks.checkpoint").measure  # ranks cannot import __main__
    with shared_nursery() as nursery:
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
        for _ in range(repetitions):
            for name in VARIANTS:
                with tempfile.TemporaryDirectory() as directory:
                    pool = Pool(nursery, RANKS)
                    ranks = pool.run(task, name, layers, directory, trainer=True, timeout=600)
                    rounds[name].append({key: max(rank[key] for rank in ranks) for key in ranks[0]})
                    print(name, {key: round(value, 3) for key, value in rounds[name][-1].items()}, flush=True)
    with torch.device("meta"):
        parameters = make_model(layers).num_parameters()
    page.add(lines(rounds, parameters))
    page.finish(options)


def headline(tables: list[Table]) -> str:
    """Say what the page shows, in a sentence."""
    ours, theirs = "ours, dp_shard=4", "Lightning's ModelParallelStrategy"
    save, resume = COLUMNS["save"], COLUMNS["resume"]
    ratios = [tables[0].number(ours, column) / tables[0].number(theirs, column) for column in (save, resume)]
    waits = tables[0].number("ours, in the background", COLUMNS["blocked"]) / tables[0].number(ours, save)
    return (
        f"a save takes {ratios[0]:.2f} and a resume {ratios[1]:.2f} of {theirs}'s; in the background, training waits "
        f"{100 * waits:.0f} % of a save"
    )


def build_strategy(name: str) -> Strategy:
    """The strategy of a row."""
    if name.startswith("Lightning"):
        return ModelParallelStrategy(data_parallel_size=RANKS, tensor_parallel_size=1)
    return FSDP2TPStrategy(tp=2 if "tp=2" in name else 1, async_save="background" in name)


def measure(name: str, layers: int, directory: str) -> dict[str, float]:
    """On one rank, in bytes and seconds."""
    paths = [Path(directory) / f"step={step}.ckpt" for step in range(3)]
    trainer = build_trainer(name)
    module = Module(layers)
    results: dict[str, float] = {}

    class Save(L.Callback):
        """Under new names, keeping one checkpoint: the first saves allocate what the third uses."""

        def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
            for before, path in zip([None, *paths], paths, strict=False):
                with Memory().measured() as memory:
                    results["blocked"] = timed(lambda path=path: trainer.save_checkpoint(path))
                    start = time.perf_counter()
                    trainer.strategy.on_train_end()  # a save in the background ends
                    results["save"] = results["blocked"] + time.perf_counter() - start
                results["save_memory"] = memory.own
                if before is not None:
                    trainer.strategy.remove_checkpoint(before)
                trainer.strategy.barrier()

    trainer.callbacks.append(Save())
    trainer.fit(module, batches())
    parts = [local_tensor(p).nbytes for p in module.parameters()]
    shards = 3 * sum(parts)
    largest = max(p.numel() * p.element_size() for p in module.parameters())
    module.model = None
    del module, trainer
    with Memory().measured() as memory:
        build_trainer(name).fit(Module(layers), batches(), ckpt_path=paths[-1])
    if int(os.environ["RANK"]) == 0:
        shutil.rmtree(paths[-1])
    results["save_memory"] /= shards
    return {**results, "resume": memory.seconds, "resume_memory": memory.own / (shards + largest)}


def build_trainer(name: str) -> L.Trainer:
    """One step, and nothing beside it."""
    return L.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=build_strategy(name),
        precision="bf16-true",
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def batches() -> DataLoader:
    """One batch of four tokens per rank."""
    return DataLoader(TensorDataset(torch.ones(RANKS, 4, dtype=torch.long)), batch_size=1)


def lines(rounds: dict[str, list[dict[str, float]]], parameters: int) -> list[str]:
    """The document."""
    result = [
        "# What a checkpoint costs",
        "",
        f"`python -m benchmarks.checkpoint --write` ({describe_machine()}).",
        "",
        f"Weights and AdamW's moments of a Llama of {parameters / 1e6:.0f} million parameters in bf16, on {RANKS} "
        "ranks of one machine and one disk. The third save of a run is timed, under a new name; the one before it is "
        "deleted afterwards. Memory is what a process holds of its own above what it held before. Medians of the worst "
        f"rank, of times with quartiles, over {max(map(len, rounds.values()))} rounds in which rows alternate. "
        "`--layers 8` takes a Llama of 410 million parameters.",
        "",
        f"| | {' | '.join(COLUMNS.values())} |",
        f"|---|{'---|' * len(COLUMNS)}",
    ]
    for name, values in rounds.items():
        cells = []
        for key in COLUMNS:
            found = [value[key] for value in values]
            cells.append(f"{median(found):.2f}" + (f" ({between(found, 2)})" if key in TIMES else ""))
        result.append(f"| {name} | {' | '.join(cells)} |")
    return result


if __name__ == "__main__":
    main()
