"""Losses of one's own (DPO, distillation, a reward head): on two ranks the loss and every gradient of one process."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

from examples.distillation import Distillation
from examples.dpo import DPO, log_probability
from examples.reward import RewardModel
from lightning_automodel import DDPStrategy, FSDP2Config, FSDP2TPStrategy
from lightning_automodel.testing.pool import Nursery, Pool
from tests.support.marks import with_long
from tests.support.training import make_trainer, whole, world_size

STEPS, PAIRS, WIDTH, VOCABULARY, PAD = 3, 4, 13, 61, 0
pytestmark = pytest.mark.timeout(300)
EXAMPLES = ("dpo", "answers apart", "distillation", "reward")
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2},
    "sequence": {"tp": 2, "config": FSDP2Config(sequence_parallel=True)},
    "dp": {},
    "cp": {"cp": 2},
    "recomputed": {"tp": 2, "config": FSDP2Config(activation_checkpointing=True)},
    "replicas": {"dp_replicate": 2},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two small models of one vocabulary, and one with a head for rewards."""
    root = tmp_path_factory.mktemp("models")
    sizes = {"vocab_size": VOCABULARY, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": PAD}
    for index, (name, hidden) in enumerate({"one": 24, "other": 32}.items()):
        torch.manual_seed(index)
        config = LlamaConfig(hidden_size=hidden, intermediate_size=40, num_hidden_layers=2, **sizes)
        AutoModelForCausalLM.from_config(config).save_pretrained(root / name)
    config = LlamaConfig(hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_labels=1, **sizes)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(root / "reward")
    return root


class AnswersApart(DPO):
    """Sees chosen and rejected answers in two forward passes, before one backward pass."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        halves = [{key: value.chunk(2)[i] for key, value in batch.items()} for i in range(2)]
        chosen, rejected = (self._gain(half) for half in halves)
        return -logsigmoid(self.beta * (chosen - rejected)).mean()

    def _gain(self, batch: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            before = log_probability(self.reference, batch)
        return log_probability(self.policy, batch) - before


def build(example: str, models: Path) -> L.LightningModule:
    if example == "answers apart":
        return AnswersApart(str(models / "one"), beta=0.5, lr=1e-2)
    if example == "reward":
        return RewardModel(str(models / "reward"), PAD, lr=1e-2)
    if example == "dpo":
        return DPO(str(models / "one"), beta=0.5, lr=1e-2)
    return Distillation(str(models / "one"), str(models / "other"))


def batches(ranks: int, rank: int) -> list[dict[str, Tensor]]:
    """Micro-batches of pairs of uneven length, of which a data rank gets every ``ranks``-th pair."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(STEPS):
        ids = torch.randint(1, VOCABULARY, (2, PAIRS, WIDTH), generator=generator)
        lengths = torch.randint(4, WIDTH + 1, (2, PAIRS, 1), generator=generator)
        places = torch.arange(WIDTH)
        mask = (places < lengths).long()
        batch = {
            "input_ids": ids * mask,
            "labels": ids.masked_fill((places < 2) | (mask == 0), -100),
            "attention_mask": mask,
        }
        found.append({key: value[:, rank::ranks].flatten(0, 1) for key, value in batch.items()})
    return found


class Gradients(L.Callback):
    """Keeps loss and gradients of every step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor]] = []

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        held = {name: p for name, p in pl_module.named_parameters() if p.requires_grad}
        self.steps.append({name: whole(p.grad) for name, p in held.items()})

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = trainer.strategy.reduce(outputs["loss"].detach().clone()) if world_size() > 1 else outputs["loss"]
        self.steps[-1]["loss"] = loss.detach().clone()


def train(models: Path, layout: str | None) -> dict[str, list[dict[str, Tensor]]]:
    """Runs on each rank: what each step gives, by example."""
    data_size = 2 if layout in ("dp", "ddp", "replicas") else 1
    results = {}
    for example in EXAMPLES:
        strategy: Any = "auto"
        if layout is not None:
            strategy = DDPStrategy() if layout == "ddp" else FSDP2TPStrategy(**LAYOUTS[layout])
        notes = Gradients()
        trainer = make_trainer(strategy, max_epochs=1, callbacks=[notes], use_distributed_sampler=False)
        rank = trainer.global_rank if data_size > 1 else 0
        trainer.fit(build(example, models), DataLoader(batches(data_size, rank), batch_size=None))  # type: ignore
        results[example] = notes.steps
    return results


@pytest.fixture(scope="module")
def expected(models: Path, nursery: Nursery) -> dict[str, list[dict[str, Tensor]]]:
    """Lightning's own strategy for one device."""
    return Pool(nursery, 1).run(train, models, None, trainer=True, timeout=300)[0]


@pytest.mark.slow
@pytest.mark.parametrize("layout", with_long([*LAYOUTS, "ddp"], *LAYOUTS.keys() - {"tp"}, "ddp"))
def test_every_gradient_is_that_of_one_process(pool2: Pool, models: Path, expected: Any, layout: str) -> None:
    found, other = pool2.run(train, models, layout, trainer=True, timeout=300)
    for example in EXAMPLES:
        assert len(expected[example]) == len(found[example]) == STEPS
        for one, two, three in zip(expected[example], found[example], other[example], strict=True):
            assert one.keys() == two.keys()
            assert not any(name.startswith(("reference.", "teacher.")) for name in one)
            scale = float(max(value.norm() for value in one.values()))
            for name, value in one.items():
                torch.testing.assert_close(two[name], value, rtol=1e-4, atol=1e-5 * scale, msg=name)
                assert torch.equal(two[name], three[name]), name
