"""The gradient of an optimizer step is that of the mean over all its tokens, however they are spread."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from lightning_automodel import DDPStrategy, FSDP2Config, FSDP2TPStrategy
from lightning_automodel.finetuning import CausalLM
from lightning_automodel.testing.pool import Nursery, Pool
from tests.support.training import SaveAfter, make_trainer, world_size

Batch = dict[str, Tensor]
Step = tuple[float, dict[str, Tensor]]  # train/loss and the gradients that the optimizer sees


class Recorder(CausalLM):
    """Remembers what the optimizer sees; a learning rate of 0 keeps every step at the same weights."""

    def __init__(self, model: str) -> None:
        super().__init__(model, optimizer=lambda parameters: SGD(parameters, lr=0.0), lr_scheduler=None)
        self.steps: list[Step] = []

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        super().on_before_optimizer_step(optimizer)
        gradients = {name: _full(p.grad).clone() for name, p in self.model.named_parameters() if p.grad is not None}
        self.steps.append((float(self.trainer.callback_metrics["train/loss"]), gradients))


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _batches(count: int) -> list[Batch]:
    """Micro-batches of different shapes, from almost no to almost all tokens trained on; the fourth has none."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for index in range(count):
        shape = (1 + index % 3, 10 + 5 * (index % 4))
        ids = torch.randint(4, 300, shape, generator=generator)
        ignored = torch.rand(shape, generator=generator) < (1.0 if index == 3 else 0.15 * (index % 5))
        batches.append({"input_ids": ids, "labels": ids.masked_fill(ignored, -100)})
    return batches


def _fit(model_dir: str, batches: list[Batch], accumulate: int, **trainer: Any) -> list[Step]:
    module = Recorder(model_dir)
    settings = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "logger": False, "enable_checkpointing": False}
    L.Trainer(**(settings | trainer), accumulate_grad_batches=accumulate, enable_progress_bar=False).fit(
        module,
        DataLoader(batches, batch_size=None, shuffle=False),  # type: ignore[arg-type]
    )
    return module.steps


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "sharded": lambda: FSDP2TPStrategy(dp_shard=2),
    "replicated": lambda: FSDP2TPStrategy(dp_shard=1, dp_replicate=2),
    "hybrid": lambda: FSDP2TPStrategy(dp_shard=2, dp_replicate=2),
    "hybrid, reduced at once": lambda: FSDP2TPStrategy(
        dp_shard=2, dp_replicate=2, config=FSDP2Config(defer_fsdp_grad_sync=False)
    ),
    "tp": lambda: FSDP2TPStrategy(tp=2),
    "ddp": DDPStrategy,
}


def _fit_share(model_dir: str, shares: list[list[Batch]], accumulate: int, name: str) -> list[Step]:
    """Runs on a rank: trains on the share of the batches that its data rank has."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    share = shares[rank * len(shares) // world]
    return _fit(model_dir, share, accumulate, devices=world, strategy=STRATEGIES[name](), use_distributed_sampler=False)


def _one_big_batch(model_dir: Path, batches: list[Batch]) -> Step:
    """Loss and gradients of the mean over all tokens of ``batches``, with plain transformers."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).train()
    tokens = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    loss = sum(model(**batch, num_items_in_batch=1).loss for batch in batches) / max(tokens, 1)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def _assert_same(step: Step, expected: Step) -> None:
    assert step[0] == pytest.approx(expected[0], rel=1e-6)
    for name, gradient in expected[1].items():
        error = (step[1][name] - gradient).norm() / gradient.norm().clamp(min=1e-12)
        assert error < 1e-5, f"{name}: relative error {error:.1e}"


def test_accumulation_equals_one_big_batch_in_partial_windows_too(model_dir: Path) -> None:
    batches = _batches(5)
    steps = _fit(str(model_dir), batches, accumulate=2)
    assert len(steps) == 3
    for index, step in enumerate(steps):
        _assert_same(step, _one_big_batch(model_dir, batches[2 * index : 2 * index + 2]))


def test_a_step_without_targets_has_no_gradient(model_dir: Path) -> None:
    batches = _batches(4)[3:]
    ((loss, gradients),) = _fit(str(model_dir), batches, accumulate=1)
    assert loss == 0
    assert all((gradient == 0).all() for gradient in gradients.values())


@pytest.mark.parametrize("name", STRATEGIES)
def test_ranks_with_different_token_counts_equal_one_process(
    model_dir: Path, pool2: Pool, pool4: Pool, name: str
) -> None:
    batches = _batches(6)
    shares = [batches] if name == "tp" else [batches[:3], batches[3:]]
    if name.startswith("hybrid"):
        batches = _batches(8)
        shares = [batches[i : i + 2] for i in range(0, 8, 2)]
    pool = pool4 if name.startswith("hybrid") else pool2
    ranks = pool.run(_fit_share, str(model_dir), shares, 2, name, trainer=True)
    count = len(shares[0])
    for start in range(0, count, 2):
        window = [batch for share in shares for batch in share[start : start + 2]]
        expected = _one_big_batch(model_dir, window)
        for steps in ranks:
            _assert_same(steps[start // 2], expected)


class Reading(SGD):
    """Keeps the losses that its steps are given."""

    read: ClassVar[list[float]] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.read.append(float(closure()))


def _fit_reading(model_dir: str, shares: list[list[Batch]], name: str) -> list[float]:
    """Runs on a rank: the losses that an optimizer reads."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    module = CausalLM(model_dir, optimizer=lambda parameters: Reading(parameters, lr=0.0), lr_scheduler=None)
    trainer = make_trainer(STRATEGIES[name](), max_epochs=1, use_distributed_sampler=False)
    trainer.fit(module, DataLoader(shares[rank * len(shares) // world], batch_size=None))  # type: ignore[arg-type]
    return Reading.read[-len(shares[0]) :]


@pytest.mark.parametrize("name", ["sharded", "tp", "ddp"])
def test_an_optimizer_reads_the_mean_whose_gradient_it_gets(model_dir: Path, pool2: Pool, name: str) -> None:
    batches = _batches(6)
    shares = [batches] if name == "tp" else [batches[:3], batches[3:]]
    expected = [_one_big_batch(model_dir, list(step))[0] for step in zip(*shares, strict=True)]
    for read in pool2.run(_fit_reading, str(model_dir), shares, name, trainer=True):
        assert read == pytest.approx(expected, rel=1e-5)


def _rows() -> list[Batch]:
    """Eight rows of one width, from almost no to almost all tokens trained on."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(4, 300, (8, 12), generator=generator)
    ignored = torch.rand(ids.shape, generator=generator) < torch.linspace(0.1, 0.9, 8)[:, None]
    labels = ids.masked_fill(ignored, -100)
    return [{"input_ids": ids[row], "labels": labels[row]} for row in range(8)]


def _go_on(model_dir: str, name: str, directory: Path, goes_on: bool) -> list[Step]:
    """Runs on a rank: steps of two micro-batches of four rows; stops behind the first one, or goes on from there."""
    module, data_size = Recorder(model_dir), 1 if name == "tp" else world_size()
    callbacks = [] if goes_on else [SaveAfter(directory, 1)]
    trainer = make_trainer(STRATEGIES[name](), max_epochs=1, accumulate_grad_batches=2, callbacks=callbacks)
    trainer.fit(module, DataLoader(_rows(), batch_size=4 // data_size), ckpt_path=directory if goes_on else None)  # type: ignore[arg-type]
    return module.steps


@pytest.mark.parametrize(("first", "second"), [(("ddp", 2), ("ddp", 1)), (("tp", 2), ("sharded", 2))])
def test_a_step_goes_on_with_another_number_of_data_ranks(
    model_dir: Path, tmp_path: Path, nursery: Nursery, first: tuple[str, int], second: tuple[str, int]
) -> None:
    path = tmp_path / "half.ckpt"
    Pool(nursery, first[1]).run(_go_on, str(model_dir), first[0], path, False, trainer=True)
    batch = {key: torch.stack([row[key] for row in _rows()]) for key in ("input_ids", "labels")}
    for steps in Pool(nursery, second[1]).run(_go_on, str(model_dir), second[0], path, True, trainer=True):
        assert len(steps) == 1
        _assert_same(steps[0], _one_big_batch(model_dir, [batch]))


def test_clipping_sees_the_weighed_gradient(model_dir: Path) -> None:
    batches = _batches(2)
    norms: list[Tensor] = []

    class Watch(L.Callback):
        def on_before_zero_grad(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Optimizer) -> None:
            gradients = [p.grad for p in module.parameters() if p.grad is not None]
            if gradients:
                norms.append(torch.nn.utils.get_total_norm(gradients))

    _fit(str(model_dir), batches * 2, accumulate=2, gradient_clip_val=0.01, callbacks=[Watch()])
    torch.testing.assert_close(norms[-1], torch.tensor(0.01), rtol=1e-4, atol=0)
