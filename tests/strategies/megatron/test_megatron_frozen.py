"""Frozen parameters under Megatron-FSDP that compute in bfloat16: they are read, written and averaged in float32."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lightning_automodel.parallel.megatron_fsdp.widening import Widened
from lightning_automodel.testing.pool import Pool
from tests.support.layouts import LAYOUTS
from tests.support.subjects import gather_part
from tests.support.training import Descending, SaveAfter, batches, make_trainer, tiny_llama


class Second(Descending):
    """Has a frozen model that gives a part of the loss: a teacher, or one that follows in small steps."""

    def __init__(self, follows: bool) -> None:
        super().__init__()
        self.follows = follows

    def configure_model(self) -> None:
        if self.model is None:
            self.model, self.second = tiny_llama(), tiny_llama().requires_grad_(False)
            if self.follows:
                torch._foreach_add_(list(self.second.parameters()), 0.5)

    def loss(self, batch: list[Tensor]) -> Tensor:
        with torch.no_grad():
            other = self.second(input_ids=batch[0]).logits
        return super().loss(batch) + 1e-3 * other.float().square().mean()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.follows:
            for mine, followed in zip(self.second.parameters(), self.model.parameters(), strict=True):
                mine.lerp_(followed.detach(), 5e-4)  # of 0.5: a quarter of what bfloat16 resolves there


def run(layout: str, directory: Path, follows: bool, resume: Path | None = None) -> dict[str, Any]:
    """Runs on each rank: six steps, or the last two of them."""
    module = Second(follows)
    saver = [] if resume else [SaveAfter(directory / "four.ckpt", 4)]
    data = batches(LAYOUTS[layout].data_size, 24)
    trainer = make_trainer(LAYOUTS[layout].make(), max_epochs=1, precision="bf16-mixed", callbacks=saver)
    trainer.fit(module, data, ckpt_path=resume)
    module.second.save_pretrained(directory)
    return {"losses": module.losses, "parameters": {name: gather_part(p) for name, p in module.named_parameters()}}


def check(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["losses"] == pytest.approx(expected["losses"][-len(found["losses"]) :], rel=1e-3)
    for name, value in expected["parameters"].items():
        assert found["parameters"][name].dtype == torch.float32, name
        assert (found["parameters"][name] - value).abs().max() < 5e-4, name


@pytest.mark.parametrize("layout", ["megatron1-dp2", "megatron3-tp2"])
def test_teachers_keep_their_digits(layout: str, pool2: Pool, tmp_path: Path) -> None:
    found = pool2.run(run, layout, tmp_path, False, trainer=True)[0]["parameters"]
    files = load_file(tmp_path / "model.safetensors")
    for name, original in tiny_llama().named_parameters():
        assert found[f"second.{name}"].equal(original), name
        assert files[name].equal(original), name


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["megatron1-dp2", "megatron3-dp2"])
def test_small_changes_add_up(layout: str, pool2: Pool, tmp_path: Path) -> None:
    expected = pool2.run(run, "ddp-2", tmp_path / "ddp", True, trainer=True)[0]
    check(pool2.run(run, layout, tmp_path / layout, True, trainer=True)[0], expected)
    for target, source in (("fsdp2-dp2", layout), (layout, "ddp")):
        resume = tmp_path / source / "four.ckpt"
        check(pool2.run(run, target, tmp_path / "on", True, resume, trainer=True)[0], expected)


def test_what_nobody_wrote_is_not_cast_again() -> None:
    parameter, computing = nn.Parameter(torch.ones(3), requires_grad=False), torch.zeros(3, dtype=torch.bfloat16)
    widened = Widened(parameter, computing)
    widened.install()
    assert computing.equal(torch.ones_like(computing))
    computing.zero_()
    widened.install()
    assert computing.equal(torch.zeros_like(computing))
    parameter.mul_(2)
    widened.install()
    assert computing.equal(torch.full_like(computing, 2))


# ---- rows that are cut apart -----------------------------------------------------------------------------------------


class Averaged(Descending):
    """Averages weights of which those of the norm are frozen, whose rows are the neighbours of the embedding's."""

    def __init__(self, one_by_one: bool) -> None:
        super().__init__()
        self.one_by_one = one_by_one

    def configure_model(self) -> None:
        if self.model is None:
            self.model, self.second = tiny_llama(), tiny_llama().requires_grad_(False)
            self.model.model.norm.requires_grad_(False)

    def loss(self, batch: list[Tensor]) -> Tensor:
        with torch.no_grad():
            self.second(input_ids=batch[0])
        return super().loss(batch)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        averages, weights = ([p.detach() for p in each.parameters()] for each in (self.second, self.model))
        if self.one_by_one:
            for average, weight in zip(averages, weights, strict=True):
                average.lerp_(weight, 0.3)
        else:
            torch._foreach_lerp_(averages, weights, 0.3)


class Kept(Averaged):
    """Keeps copies in the layout of the weights."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.kept = [p.detach().clone() for p in self.model.parameters()]
        for average, weight in zip(self.kept, self.model.parameters(), strict=True):
            average.lerp_(weight.detach(), 0.3)


def said(module: Descending) -> str:
    """Runs on each rank: the error of a run, or nothing."""
    try:
        make_trainer(LAYOUTS["megatron3-dp2"].make(), max_epochs=1).fit(module, batches(2))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.slow
def test_rows_that_are_cut_apart_are_not_combined(pool2: Pool) -> None:
    """Some ranks would combine unlike rows, by broadcasting, and others would end in an error of sizes."""
    for one_by_one in (True, False):
        found = pool2.run(said, Averaged(one_by_one), trainer=True)
        assert "(61, 24) that Megatron-FSDP shards are combined, of which this rank holds 32 rows and 31" in found[0]
        assert all("EMAWeightAveraging" in each for each in found)
    assert pool2.run(said, Kept(True), trainer=True) == ["", ""]
