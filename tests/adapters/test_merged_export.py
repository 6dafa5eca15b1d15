"""A merged model is what trained: in the digits of the run, and alone in its directory."""

from pathlib import Path
from typing import Any

import lightning as L
import peft
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from lightning_automodel.checkpointing.conversion import export
from lightning_automodel.finetuning import HuggingFaceExport
from tests.support.training import VOCABULARY, Recorder, batches, make_trainer, tiny_llama

IDS = torch.arange(VOCABULARY)[None]


class Adapted(Recorder):
    """Trains an adapter that is not zero at the start."""

    def __init__(self, base: Path, seed: int = 0) -> None:
        super().__init__()
        self.base, self.seed = base, seed

    def configure_model(self) -> None:
        if self.model is None:
            base = AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.get_default_dtype())
            torch.manual_seed(self.seed)
            self.model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.model(input_ids=batch[0], labels=batch[0]).loss


def trained(base: Path, path: Path, seed: int = 0, **arguments: Any) -> Tensor:
    """Logits of a model of which the checkpoint ``path`` is left."""
    module = Adapted(base, seed)
    trainer: L.Trainer = make_trainer({}, max_steps=1, **arguments)
    trainer.fit(module, batches(1))
    trainer.save_checkpoint(path)
    with torch.no_grad():
        return module.model.eval()(IDS).logits


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Files in bfloat16."""
    tiny_llama(tied=False).bfloat16().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def logits_of(directory: Path, **arguments: Any) -> Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(directory, **arguments)(IDS).logits


def test_adapters_are_added_in_the_digits_of_the_run(base: Path, tmp_path: Path) -> None:
    """They were added in those of the base's files, and the sum was rounded to 8 bits: 1e-3 of the logits."""
    expected = trained(base, tmp_path / "1.ckpt")
    for dtype in (None, "float32"):
        export(str(tmp_path / "1.ckpt"), str(tmp_path / f"{dtype}"), merge=True, dtype=dtype)
        found = logits_of(tmp_path / f"{dtype}")
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
    export(str(tmp_path / "1.ckpt"), str(tmp_path / "half"), merge=True, dtype="bfloat16")
    assert logits_of(tmp_path / "half").dtype == torch.bfloat16


def test_a_merged_model_takes_the_place_of_an_adapter(base: Path, tmp_path: Path) -> None:
    """from_pretrained looks for an adapter first, and read the one that was there before, and the base below it."""
    trained(base, tmp_path / "1.ckpt")
    export(str(tmp_path / "1.ckpt"), str(tmp_path / "out"))
    expected = trained(base, tmp_path / "2.ckpt", seed=1)
    export(str(tmp_path / "2.ckpt"), str(tmp_path / "out"), merge=True, overwrite=True)
    torch.testing.assert_close(logits_of(tmp_path / "out"), expected, rtol=0, atol=2e-6)
    export(str(tmp_path / "1.ckpt"), str(tmp_path / "out"), overwrite=True)
    with pytest.raises(ValueError, match=r"holds an adapter .* which from_pretrained would read instead"):
        trained(base, tmp_path / "3.ckpt", callbacks=[HuggingFaceExport(str(tmp_path / "out"), merge=True)])


# ---- a reference beside it -------------------------------------------------------------------------------------------


class Preferring(Adapted):
    """Has a reference whose weights have the names of the frozen base, which no checkpoint holds."""

    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            self.model = get_peft_model(self.model.unload(), LoraConfig(target_modules="all-linear"))
            self.reference = AutoModelForCausalLM.from_pretrained(self.base).requires_grad_(False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        gap = self.model(input_ids=batch[0], labels=batch[0]).loss - self.reference(batch[0], labels=batch[0]).loss
        self.losses.append(float(gap))
        return gap


def test_a_base_is_not_taken_for_the_reference_beside_it(base: Path, tmp_path: Path) -> None:
    """On resume its weights were not read, as if those of the reference were its own, and were what memory held."""
    module, resumed = Preferring(base), Preferring(base)
    make_trainer({}, max_steps=1).fit(module, batches(1))
    module.trainer.save_checkpoint(tmp_path / "1.ckpt")
    make_trainer({}, max_steps=2).fit(resumed, batches(1), ckpt_path=tmp_path / "1.ckpt")
    whole = Preferring(base)
    make_trainer({}, max_steps=2).fit(whole, batches(1))
    assert module.losses + resumed.losses == whole.losses


@pytest.mark.parametrize("merge", [False, True])
def test_the_adapted_model_is_written_beside_a_reference(base: Path, tmp_path: Path, merge: bool) -> None:
    """It ended, behind all of the training, in "too many values to unpack"."""
    module, directory = Preferring(base), tmp_path / "out"
    exporter = HuggingFaceExport(str(directory), merge=merge)
    make_trainer({}, max_steps=1, callbacks=[exporter]).fit(module, batches(1))
    with torch.no_grad():
        expected = module.model.eval()(IDS).logits
    torch.testing.assert_close(logits_of(directory, dtype=torch.float32), expected, rtol=0, atol=2e-6)


# ---- several adapters ------------------------------------------------------------------------------------------------


class Several(Adapted):
    """Trains one adapter per step; that of the last one stays in use."""

    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
            self.model.add_adapter("other", config)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.model.set_adapter(["default", "other"][batch_idx % 2])
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for n, p in self.named_parameters() if "lora_" in n], lr=0.1)


def test_adapters_that_are_not_merged_are_named(base: Path, tmp_path: Path) -> None:
    """Those of the policy were left out without a word where a reference was the last to be used."""
    module, said = Several(base), r"in use in the end: 'other', without 'default'\. For others call set_adapter"
    exporter = HuggingFaceExport(str(tmp_path / "a"), merge=True)
    trainer: L.Trainer = make_trainer({}, max_steps=2, callbacks=[exporter])
    with pytest.warns(UserWarning, match=said):
        trainer.fit(module, batches(1))
    trainer.save_checkpoint(tmp_path / "1.ckpt")
    with pytest.warns(UserWarning, match=said):
        export(str(tmp_path / "1.ckpt"), str(tmp_path / "b"), merge=True)
    with torch.no_grad():
        expected = module.model.eval()(IDS).logits
    for directory in "ab":
        torch.testing.assert_close(logits_of(tmp_path / directory), expected, rtol=0, atol=2e-6)


CANNOT: dict[str, tuple[Any, bool, str]] = {
    "no bias to add to": (
        peft.BeftConfig(target_modules=["q_proj"]),
        True,
        r"merge: .*q_proj .*Base layer has no bias",
    ),
    "of the input": (
        peft.LilyConfig(target_modules=["q_proj"]),
        True,
        r"merge: .*not supported for Lily.*adapters alone",
    ),
    "of tasks": (
        peft.PolyConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"),
        True,
        r"merge: .*poly.* cannot be added to weights; export the adapters alone",
    ),
    "of the weights": (
        peft.FrodConfig(target_modules=["q_proj"], progressbar=False),
        False,
        r"export: FrodConfig computes with weights of the base .*save_pretrained\(directory\) of the PeftModel",
    ),
}


@pytest.mark.parametrize("kind", CANNOT)
def test_what_peft_cannot_write_is_said_before_training(kind: str, base: Path, tmp_path: Path) -> None:
    config, merge, message = CANNOT[kind]
    module = Adapted(base)
    module.model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    exporting = HuggingFaceExport(str(tmp_path / "written"), merge=merge)
    trainer = make_trainer({}, max_steps=1, callbacks=[exporting])
    with pytest.raises(ValueError, match=message):
        trainer.fit(module, batches(1))
    assert trainer.global_step == 0
