"""One row of the ladder, in a process of its own: `python -m benchmarks.gpu.measure`, a line of JSON in and one out.

It imports what every row needs before it reads which row it is, so that it can be started while another one measures.
"""

import json
import sys
import time
import traceback
from itertools import pairwise
from statistics import median
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from benchmarks._measure import quartiles
from benchmarks.gpu.kept import Found
from benchmarks.gpu.profiles import read_profile
from benchmarks.gpu.rows import Row
from lightning_automodel import FSDP2Config, FSDP2TPStrategy

WARM, LEAST, STEPS = 3, 3, 8
SECONDS = 12  # of measured steps: then LEAST of them are enough
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Clock:
    """Notes when steps begin.

    Args:
        profiles: let another step run behind those that are measured, and see what the device does in it.
    """

    def __init__(self, profiles: bool = False) -> None:
        self.times: list[float] = []
        self.memory = {"peak": 0, "reserved": 0}
        self.profile = torch.profiler.profile() if profiles else None
        self._profiling = False

    def tick(self) -> bool:
        """Note that a step begins, when the device has done what it was asked for; tell whether that was enough."""
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        if self.profile is not None and self._profiling:
            self.profile.stop()
            return True
        if len(self.times) == WARM and DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()  # what compiling and first steps need is not what training needs
        self.times.append(time.perf_counter())
        measured = len(self.times) - 1 - WARM
        if measured < STEPS and (measured < LEAST or self.times[-1] - self.times[WARM] <= SECONDS):
            return False
        if DEVICE == "cuda":
            self.memory = {"peak": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
        if self.profile is None:
            return True
        self.profile.start()
        self._profiling = True
        return False

    def steps(self) -> list[float]:
        """Seconds of each step, the warm ones first."""
        return [after - before for before, after in pairwise(self.times)]


def build(row: Row, smoke: bool) -> nn.Module:
    """Build the model, with its adapters, where it is called for: on the meta device in ``configure_model``."""
    config = row.config(smoke)
    if row.experts is not None:
        config._experts_implementation = row.experts
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if row.adapters is None:
        return model
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(r=16, target_modules=row.adapters), autocast_adapter_dtype=False)
    for parameter in adapted.parameters():  # on the meta device peft leaves adapters in float32
        parameter.data = parameter.data.to(torch.bfloat16)
    return adapted  # type: ignore[return-value]


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW over what trains, in one kernel."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5, fused=DEVICE == "cuda")


class Module(L.LightningModule):
    """Trains until enough steps were measured."""

    def __init__(self, row: Row, smoke: bool, clock: Clock) -> None:
        super().__init__()
        self.row, self.smoke, self.clock = row, smoke, clock
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            with torch.device("meta"):
                self.model = build(self.row, self.smoke)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.clock.tick() else None  # -1 ends the epoch, here the only one

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self)


def batch_of(row: Row, smoke: bool) -> Tensor:
    """Random tokens, [rows, length]."""
    vocabulary = row.config(smoke).vocab_size
    return torch.randint(vocabulary, (row.rows, row.tokens(smoke)), generator=torch.Generator().manual_seed(0))


def by_trainer(row: Row, smoke: bool, clock: Clock) -> None:
    """Train under the Trainer."""
    trainer = L.Trainer(
        accelerator=DEVICE,
        devices=1,
        precision="bf16-true",
        strategy=FSDP2TPStrategy(config=FSDP2Config(**row.fields)),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batches = [batch_of(row, smoke)] * (WARM + STEPS + 2)
    trainer.fit(Module(row, smoke, clock), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]


def by_hand(row: Row, smoke: bool, clock: Clock) -> None:
    """The same without Lightning and without this package."""
    with torch.device(DEVICE):
        model: Any = build(row, smoke).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer, batch = make_optimizer(model), batch_of(row, smoke)
    while not clock.tick():
        ids = batch.to(DEVICE)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def measure(row: Row, smoke: bool, profiles: bool) -> Found:
    """Seconds per step (median and quartiles), of the first one and of all before it, and peak memory in bytes."""
    clock, start = Clock(profiles), time.perf_counter()
    (by_hand if row.by_hand else by_trainer)(row, smoke, clock)
    first, *_ = steps = clock.steps()
    low, high = quartiles(steps[WARM:])
    found = {"seconds": median(steps[WARM:]), "low": low, "high": high, "steps": len(steps) - WARM}
    found |= {"build": clock.times[0] - start, "first": first, **clock.memory}
    return found | (read_profile(clock.profile) if clock.profile is not None else {})


def main() -> None:
    """Measure the row that stands on the standard input; an error is a result too."""
    task = json.loads(sys.stdin.readline())
    try:
        found: Found = measure(Row(**task["row"]), task["smoke"], task["profiles"])
    except Exception as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
