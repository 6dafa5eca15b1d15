"""A frozen base that a run changes, as ReLoRA does, is in its checkpoints, and in those of the runs that go on."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor

from lightning_automodel.testing.pool import Pool
from tests.adapters.test_configure_model import Adapted, lora
from tests.support.adapted import stored_names
from tests.support.layouts import LAYOUTS
from tests.support.marks import with_long
from tests.support.subjects import gather_part
from tests.support.training import batches, make_trainer, rows, tiny_llama

STEPS, CHANGES_AT = 4, 1
CHANGED = "q_proj.base_layer.weight"


class Merging(Adapted):
    """Adds to its base what the adapters of a projection give, and lets these begin anew."""

    def __init__(self, directory: Path, changes_at: int | None = CHANGES_AT) -> None:
        super().__init__(directory, lora, keeps_gradients=False)
        self.changes_at = changes_at

    def on_train_batch_end(self, *args: Any) -> None:
        if self.trainer.global_step != self.changes_at:
            return
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.endswith(CHANGED):
                    parameter.mul_(0.5)
                elif ".q_proj.lora_B" in name:
                    parameter.zero_()


class Thawed(Adapted):
    """Trains a part of its base for a step."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, lora, keeps_gradients=False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_batch_start(self, *args: Any) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith(CHANGED):
                parameter.requires_grad_(self.trainer.global_step == 0)


def fit(module: Adapted, layout: str, steps: int, begins_from: Path | None = None) -> Any:
    trainer = make_trainer(LAYOUTS[layout].make(), max_steps=steps)
    trainer.fit(module, batches(LAYOUTS[layout].data_size), ckpt_path=begins_from)
    return trainer


def whole_of(module: Adapted) -> dict[str, Tensor | None]:
    return {name: gather_part(parameter) for name, parameter in module.named_parameters()}


def unbroken_and_resumed(
    kind: type[Adapted], directory: Path, first: str, second: str
) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None], list[set[str]]]:
    """Parameters of both, and the names in two checkpoints: of the first run, and of the one that went on."""
    unbroken = kind(directory / "base")
    fit(unbroken, first, STEPS)
    paths = [directory / "first.ckpt", directory / "second.ckpt"]
    fit(kind(directory / "base"), first, 2).save_checkpoint(paths[0])
    fit(kind(directory / "base"), second, 3, paths[0]).save_checkpoint(paths[1])
    resumed = kind(directory / "base")
    fit(resumed, first, STEPS, paths[1])
    return whole_of(unbroken), whole_of(resumed), [stored_names(p) for p in paths]


WAYS = [("fsdp2-dp2", "ddp-2"), ("fsdp2-tp2", "fsdp2-tp2"), ("ddp-2", "fsdp2-dp2"), ("megatron3-dp2", "fsdp2-dp2")]


ALL = [*((Merging, way) for way in WAYS), (Thawed, WAYS[0])]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "way"), with_long(ALL, *ALL[:3]))
def test_a_base_that_changes_is_saved(kind: type[Adapted], way: tuple[str, str], tmp_path: Path, pool2: Pool) -> None:
    tiny_llama(tied=False).save_pretrained(tmp_path / "base")
    unbroken, resumed, names = pool2.run(unbroken_and_resumed, kind, tmp_path, *way, trainer=True)[0]
    assert unbroken.keys() == resumed.keys()
    for name, value in unbroken.items():
        torch.testing.assert_close(resumed[name], value, rtol=1e-5, atol=1e-6)
    for found in names:
        bases = {name for name in found if ".base_layer." in name}
        assert bases
        assert all(name.endswith(CHANGED) for name in bases)


def names_of_unchanged(directory: Path) -> set[str]:
    fit(Merging(directory / "base", None), "fsdp2-dp2", 2).save_checkpoint(directory / "unchanged.ckpt")
    return stored_names(directory / "unchanged.ckpt")


def test_a_base_that_stays_is_not(tmp_path: Path, pool2: Pool) -> None:
    tiny_llama(tied=False).save_pretrained(tmp_path / "base")
    names = pool2.run(names_of_unchanged, tmp_path, trainer=True)[0]
    assert names
    assert not any(".base_layer." in name for name in names)


class MergedForEvaluation(Adapted):
    """Evaluates with adapters that are merged, up to the hook whose name it gets."""

    def __init__(self, directory: Path, unmerges_in: str) -> None:
        super().__init__(directory, partial(lora, init_lora_weights=False), keeps_gradients=False)
        setattr(self, unmerges_in, lambda: self.model.unmerge_adapter())

    def on_validation_start(self) -> None:
        self.model.merge_adapter()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("loss", self.loss(batch))


def evaluate_and_save(directory: Path, unmerges_in: str) -> str:
    """Runs on each rank: what refuses to save; empty if nothing does."""
    saver = ModelCheckpoint(dirpath=directory / unmerges_in, monitor="loss")
    trainer = make_trainer({}, max_steps=2, val_check_interval=2, callbacks=[saver], enable_checkpointing=True)
    try:
        module = MergedForEvaluation(directory / "base", unmerges_in)
        trainer.fit(module, batches(2), batches(2))
    except ValueError as refusal:
        return str(refusal)
    return ""


class Interrupted(MergedForEvaluation):
    """Ends with an exception while its adapters are merged, when a callback saves."""

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        raise RuntimeError("meant")


def save_interrupted(directory: Path) -> str:
    """Runs on each rank: what the run ends with."""
    saver = OnExceptionCheckpoint(directory, "interrupted")
    trainer = make_trainer({}, max_steps=2, val_check_interval=2, callbacks=[saver], enable_checkpointing=True)
    with pytest.raises((RuntimeError, ValueError)) as caught:
        trainer.fit(Interrupted(directory / "base", "on_validation_end"), batches(2), batches(2))
    return str(caught.value)


def test_merged_adapters_are_not_saved_by_an_interrupted_run(tmp_path: Path, pool2: Pool) -> None:
    tiny_llama(tied=False).save_pretrained(tmp_path / "base")
    for message in pool2.run(save_interrupted, tmp_path, trainer=True):
        assert "are merged into its weights" in message
    assert not (tmp_path / "interrupted.ckpt").exists()


@pytest.mark.slow
def test_merged_adapters_are_not_saved_with_their_base(tmp_path: Path, pool2: Pool) -> None:
    tiny_llama(tied=False).save_pretrained(tmp_path / "base")
    for message in pool2.run(evaluate_and_save, tmp_path, "on_validation_end", trainer=True):
        assert "the adapters of model.base_model.model.model.layers.0.self_attn.q_proj are merged" in message
        assert "on_validation_epoch_end may unmerge" in message
    assert set(pool2.run(evaluate_and_save, tmp_path, "on_validation_epoch_end", trainer=True)) == {""}


def logits_merged_and_not(directory: Path) -> tuple[Tensor, Tensor]:
    """Runs on each rank: of DoRA, whose norms are those of whole rows."""
    module = Adapted(directory, partial(lora, init_lora_weights=False, use_dora=True), keeps_gradients=False)
    make_trainer({"tp": 2}, max_steps=2).fit(module, batches(1))
    found = []
    with torch.no_grad():
        for merge in (lambda: None, module.model.merge_adapter):
            merge()
            found.append(module.model.eval()(input_ids=rows(2)).logits)
    return found[0], found[1]


@pytest.mark.slow
def test_dora_merges_where_it_is_split(tmp_path: Path, pool2: Pool) -> None:
    tiny_llama(tied=False).save_pretrained(tmp_path)
    for apart, merged in pool2.run(logits_merged_and_not, tmp_path, trainer=True):
        torch.testing.assert_close(merged, apart)
