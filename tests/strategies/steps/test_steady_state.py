"""What a step costs that is not computing: reads of values by the host, and collectives, once a run is under way."""

import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM

from lightning_automodel import DDPStrategy, FSDP2TPStrategy
from lightning_automodel._compat.torch.tensors import TorchDispatchMode, name_of_operation
from lightning_automodel.callbacks import Health, Throughput
from lightning_automodel.finetuning import CausalLM
from lightning_automodel.testing.pool import Pool
from tests.support.training import VOCABULARY, make_trainer, tiny_llama

FROM, STEPS, ACCUMULATED = 6, 4, 2  # behind batch 10, which ranks compare, and before the next one, 100
MICRO_BATCHES = STEPS * ACCUMULATED
LAYERS = 2
READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal")
ON_THE_HOST = {
    "finite.py": 2 * STEPS,  # are gradients finite, of this rank and of all? An accelerator reads that itself
    "vocab_parallel.py": MICRO_BATCHES,  # are labels in the vocabulary? An accelerator asserts that itself
    "preemption.py": 2 * (STEPS - 1),  # signals of all ranks, exchanged beside the step before
    "sliced_draws.py": LAYERS * MICRO_BATCHES,  # states of generators: did a block draw after all?
    "random_numbers.py": LAYERS * MICRO_BATCHES,  # the seed of a rank's rows under cp, drawn on the host
    "masking_utils.py": MICRO_BATCHES,  # transformers' own, of masks
    "optimizer.py": STEPS * (9 * LAYERS + 2),  # torch's own: the number of the step, for each parameter
}
"""Reads of values, at most, by the file that reads: none of them waits for a device."""


class Counted(TorchDispatchMode):
    """Notes reads of values by the file that reads, and collectives by their names."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[str] = Counter()
        self.collectives: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = name_of_operation(func)
        if name in READS:
            frames = [f for f in traceback.extract_stack() if "/torch/" not in f.filename or "optim/" in f.filename]
            frame = frames[-2]
            self.reads[Path(frame.filename).name] += 1
        elif func.namespace in ("c10d", "_c10d_functional", "lightning_automodel"):
            self.collectives[name.partition("::")[2]] += 1
        return func(*args, **(kwargs or {}))


class Middle(Callback):
    """Counts the steps from ``FROM`` on."""

    def __init__(self) -> None:
        self.counted = Counted()

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == FROM * ACCUMULATED:
            self.counted.__enter__()

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        if trainer.global_step == FROM + STEPS and args[-1] % ACCUMULATED == ACCUMULATED - 1:
            self.counted.__exit__(None, None, None)
            trainer.should_stop = True


class Plain(L.LightningModule):
    """As users write it: one model, one loss that is logged."""

    def __init__(self, is_shown: bool = False) -> None:
        super().__init__()
        self.model: Any = None
        self.is_shown = is_shown

    def configure_model(self) -> None:
        if self.model is None:
            self.model = tiny_llama()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.log("train/loss", loss, prog_bar=self.is_shown)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


ONCE = STEPS + STEPS + STEPS - 1
"""All-reduces of a layout: whether gradients are finite, their norm, signals."""
COLLECTIVES: dict[str, dict[str, int]] = {
    "tp": {"allreduce_": MICRO_BATCHES * (4 * LAYERS + 4)},  # two each way of a block; embedding, head, two of the loss
    "shards": {"all_gather": 4 * MICRO_BATCHES, "reduce_scatter": 3 * STEPS, "allreduce_": 0},
    "cp": {
        "all_gather": 4 * MICRO_BATCHES,
        "reduce_scatter": 3 * STEPS,
        "alltoall_base_": MICRO_BATCHES * 2 * 4 * LAYERS,  # queries, keys, values and what attention gives, each way
        "allreduce_": MICRO_BATCHES,  # the loss of all rows
    },
    "ddp": {"allreduce_": 0},  # its buckets are reduced below what is seen here
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2},
    "shards": {"dp_shard": 2},
    "cp": {"cp": 2},
    "ddp": {},
}


def loader() -> DataLoader:
    count = 2 * ACCUMULATED * (FROM + STEPS + 1) * 2
    ids = torch.randint(VOCABULARY, (count, 9), generator=torch.Generator().manual_seed(1))  # which cp=2 cuts
    return DataLoader([{"input_ids": row, "labels": row} for row in ids], batch_size=2)  # type: ignore[arg-type]


def steady(layout: str, kind: str, folder: str) -> tuple[Counter[str], Counter[str]]:
    """Runs on each rank."""
    sizes = LAYOUTS[layout]
    strategy = DDPStrategy() if layout == "ddp" else FSDP2TPStrategy(**sizes)
    middle, callbacks = Middle(), [Throughput(peak=1e12), Health()] if kind == "watched" else []
    run = make_trainer(
        strategy,
        max_steps=100,
        accumulate_grad_batches=ACCUMULATED,
        gradient_clip_val=1.0,
        log_every_n_steps=1000,
        callbacks=[*callbacks, middle],
    )
    run.fit(CausalLM(folder) if kind == "causal" else Plain(kind == "shown"), loader())
    assert run.global_step == FROM + STEPS
    return middle.counted.reads, middle.counted.collectives


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    model = tiny_llama()
    assert isinstance(model, LlamaForCausalLM)
    model.save_pretrained(path)
    return str(path)


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        *((layout, "causal") for layout in LAYOUTS),
        *(pytest.param("tp", kind, marks=pytest.mark.long) for kind in ("plain", "watched")),
    ],
)
def test_the_host_reads_nothing_and_sends_no_objects(pool2: Pool, folder: str, layout: str, kind: str) -> None:
    for reads, collectives in pool2.run(steady, layout, kind, folder, trainer=True):
        assert reads.keys() <= ON_THE_HOST.keys()
        assert all(count <= ON_THE_HOST[name] for name, count in reads.items()), reads
        expected = dict(COLLECTIVES[layout])
        of_loss = STEPS * (kind == "causal")  # targets of the step, of all data ranks
        expected["allreduce_"] += ONCE + of_loss
        assert collectives == expected


@pytest.mark.long
def test_what_is_read_by_a_module_is_found(pool2: Pool, folder: str) -> None:
    """The counter itself: a loss that is logged with ``prog_bar=True`` is read after every batch."""
    for reads, _ in pool2.run(steady, "tp", "shown", folder, trainer=True):
        assert reads["apply_func.py"] >= MICRO_BATCHES - 1
