"""The same run under every strategy: losses, gradient norms, memory and speed. Writes docs/strategies.md.

A Llama with random weights takes some AdamW steps on random tokens, on one process and on two ranks. Memory is what a
rank's resident set grew by at its peak, from before the model was built: the median over rounds. Rounds of all runs
alternate; speed is that of the median step of all rounds, with quartiles, and leaves the first step of a round out.
Losses and norms are those of the first round.
"""

import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks._measure import between, describe_machine, forget_peak, status
from benchmarks._nursery import shared_nursery
from benchmarks._page import Page, Table
from lightning_automodel import DDPStrategy, FSDP2TPStrategy
from lightning_automodel.testing.pool import Pool
from tests.support.layouts import LAYOUTS

SIZES: dict[str, Any] = dict(
    hidden_size=384,
    intermediate_size=1056,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_size=4096,
    use_cache=False,
)
ROWS, LENGTH, STEPS = 4, 64, 4
RUNS: dict[str, tuple[int, int, Callable[[], Strategy]]] = {  # ranks, ranks that see different samples, strategy
    "one process": (1, 1, FSDP2TPStrategy),
    "DDP, dp=2": (2, 2, DDPStrategy),
    "FSDP2, dp=2": (2, 2, FSDP2TPStrategy),
    "FSDP2 x TP, tp=2": (2, 1, lambda: FSDP2TPStrategy(tp=2)),
    "FSDP2 x TP, dp=2 x tp=2": (4, 2, lambda: FSDP2TPStrategy(tp=2)),
    "Megatron-FSDP, dp=2, stage 1": (2, 2, LAYOUTS["megatron1-dp2"].make),
    "Megatron-FSDP, dp=2, stage 3": (2, 2, LAYOUTS["megatron3-dp2"].make),
    "Megatron-FSDP, tp=2, stage 3": (2, 1, LAYOUTS["megatron3-tp2"].make),
}
MIB = 2**20


class Run(L.LightningModule):
    """Notes what the table shows."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Any = None
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.times: list[float] = []

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(0)
            self.model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.model(input_ids=batch[0], labels=batch[0]).loss
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach())))
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        plugin: Any = self.trainer.precision_plugin
        self.norms.append(float(plugin.clip_norm(list(self.parameters()), float("inf"))))

    def on_train_batch_end(self, *_: Any) -> None:
        self.times.append(time.perf_counter())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def run(name: str, steps: int) -> dict[str, Any]:
    """Runs on each rank."""
    ranks, data_size, make = RUNS[name]
    ids = torch.randint(3, SIZES["vocab_size"], (ROWS * steps, LENGTH), generator=torch.Generator().manual_seed(0))
    before = status("VmRSS")
    forget_peak()
    module = Run()
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = L.Trainer(accelerator="cpu", devices=ranks, strategy=make(), max_epochs=1, **quiet)
    trainer.fit(module, DataLoader(TensorDataset(ids), batch_size=ROWS // data_size))
    return {
        "losses": module.losses,
        "norms": module.norms,
        "peak": (status("VmHWM") - before) / 2**20,
        "speeds": [ROWS * LENGTH / (after - before) for before, after in pairwise(module.times)],
    }


def describe() -> list[str]:
    """Configuration and versions."""
    sizes = ", ".join(f"{key} {value}" for key, value in SIZES.items() if key != "use_cache")
    return [
        "# One run under every strategy",
        "",
        (__doc__ or "").partition("\n\n")[2].strip(),
        "",
        f"{sizes}; float32; {ROWS} rows of {LENGTH} tokens per step over all ranks, {STEPS} steps. "
        f"{describe_machine('megatron-fsdp')}. Written by `python -m benchmarks.strategies --write`.",
        "",
        "Megatron-FSDP runs here through the tests' stand-in for CUDA streams: its numbers are the library's, but",
        "speed and memory say nothing about a GPU. Two cores serve all ranks: no scaling can be read from this.",
        "",
        "| run | loss, first and last | from one process | norm, first and last | from one process | peak MiB per rank "
        "| tokens/s | quartiles |",
        "|---|---|---|---|---|---|---|---|",
    ]


def row(name: str, rounds: list[list[dict[str, Any]]], one: dict[str, Any]) -> str:
    """One line of the table."""
    first = rounds[0][0]
    cells = [name]
    for key in ("losses", "norms"):
        error = max(abs(a - e) / abs(e) for a, e in zip(first[key], one[key], strict=True))
        cells += [f"{first[key][0]:.6f}, {first[key][-1]:.6f}", f"{error:.0e}"]
    speeds = [speed for ranks in rounds for speed in ranks[0]["speeds"]]
    peak = median(max(rank["peak"] for rank in ranks) for ranks in rounds)
    cells += [f"{peak:.0f}", f"{median(speeds):.0f}", between(speeds)]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Entry point of ``python -m benchmarks.strategies``."""
    page = Page("strategies.md", "strategies")
    arguments = page.parser(__doc__, rounds=2).parse_args()
    steps, rounds = (2, 1) if arguments.smoke else (STEPS, arguments.rounds)
    page.add(describe())
    found: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in RUNS}
    with shared_nursery() as nursery:
        for _ in range(rounds):
            for name, (ranks, *_) in RUNS.items():
                found[name].append(Pool(nursery, ranks).run(run, name, steps, trainer=True, timeout=300))
    one = found["one process"][0][0]
    page.add(row(name, of_name, one) for name, of_name in found.items())
    page.finish(arguments)


def headline(tables: list[Table]) -> str:
    """Say what the page shows, in a sentence."""
    errors = [float(row[index]) for row in tables[0].rows for index in (2, 4)]
    return f"losses and norms of {len(tables[0].rows) - 1} layouts are within {max(errors):.0e} of one process"


if __name__ == "__main__":
    from benchmarks import strategies  # by its own name: ranks must be able to import what they run

    strategies.main()
