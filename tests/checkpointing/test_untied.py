"""A head that the user put beside an embedding which the class ties to it is written, by every way out of a run."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from lightning_automodel.checkpointing.conversion import export
from lightning_automodel.finetuning import HuggingFaceExport
from lightning_automodel.testing.pool import Pool
from tests.adapters.test_configure_model import ARGUMENTS, Adapted
from tests.support.layouts import LAYOUTS
from tests.support.marks import with_long
from tests.support.training import HIDDEN, VOCABULARY, batches, make_trainer, rows, tiny_llama

SAVED = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}


def new_head(base: Any, directory: Path) -> nn.Module:
    """Train a head of its own."""
    base.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
    return base


def frozen_head(base: Any, directory: Path) -> nn.Module:
    """Freeze it below adapters, where files have the embedding only."""
    base.lm_head.weight = nn.Parameter(base.lm_head.weight.detach() * 1.5)
    return get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))


def merged_head(base: Any, directory: Path) -> nn.Module:
    """Go on from adapters that trained both."""
    merged: Any = PeftModel.from_pretrained(base, directory / "adapter").merge_and_unload()
    return get_peft_model(merged, LoraConfig(r=2, target_modules=["o_proj"], init_lora_weights=False))


class Saving(Adapted):
    """Saves as a user does, where that writes whole models."""

    def on_train_end(self) -> None:
        if not isinstance(self.model, PeftModel):
            self.model.save_pretrained(self.directory / "saved")


def trained(layout: str, change: Callable[[Any, Path], nn.Module], directory: Path) -> Tensor:
    """Runs on each rank: logits behind training, an export and a checkpoint."""
    module = Saving(directory, partial(change, directory=directory), keeps_gradients=False)
    exporting = HuggingFaceExport(str(directory / "exported"), merge=True)
    trainer = make_trainer(LAYOUTS[layout].make(), callbacks=[exporting], **ARGUMENTS)
    trainer.fit(module, batches(LAYOUTS[layout].data_size, 32))
    trainer.save_checkpoint(directory / "last.ckpt")
    return logits(module.model)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=rows(4)).logits


@pytest.mark.parametrize("layout", with_long(["fsdp2-tp2", "megatron3-dp2", "ddp-2"], "megatron3-dp2", "ddp-2"))
@pytest.mark.parametrize("change", [new_head, frozen_head, merged_head])
def test_it_is_written(change: Callable[[Any, Path], nn.Module], layout: str, tmp_path: Path, pool2: Pool) -> None:
    tiny_llama().save_pretrained(tmp_path)
    adapted: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path), LoraConfig(r=2, **SAVED))
    with torch.no_grad():
        for parameter in adapted.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape) * parameter.requires_grad)
    adapted.save_pretrained(tmp_path / "adapter")
    expected = pool2.run(trained, layout, change, tmp_path, trainer=True)[0]
    export(str(tmp_path / "last.ckpt"), str(tmp_path / "of checkpoint"), merge=True)
    for name in ("exported", "of checkpoint", *(["saved"] if change is new_head else [])):
        found = logits(AutoModelForCausalLM.from_pretrained(tmp_path / name))
        assert (found - expected).norm() <= 1e-5 * expected.norm(), name


# ---- usual ties ------------------------------------------------------------------------------------------------------


def as_it_is(base: Any, directory: Path) -> nn.Module:
    return base


def adapted(base: Any, directory: Path) -> nn.Module:
    return get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))


def adapted_table(base: Any, directory: Path) -> nn.Module:
    return get_peft_model(base, LoraConfig(r=2, target_modules=["embed_tokens"], init_lora_weights=False))


USUAL = {as_it_is: True, adapted: True, adapted_table: False}
TIED = [(change, layout) for change in USUAL for layout in ("fsdp2-dp2", "fsdp2-tp2", "megatron3-dp2", "ddp-2")]


@pytest.mark.parametrize(("change", "layout"), with_long(TIED, *TIED[1:7], *TIED[9:]))
def test_what_is_tied_stays_so(
    change: Callable[[Any, Path], nn.Module], layout: str, tmp_path: Path, pool2: Pool
) -> None:
    tiny_llama().save_pretrained(tmp_path)
    expected = pool2.run(trained, layout, change, tmp_path, trainer=True)[0]
    export(str(tmp_path / "last.ckpt"), str(tmp_path / "of checkpoint"), merge=change is not as_it_is)
    for name in ("exported", "of checkpoint", *(["saved"] if change is as_it_is else [])):
        model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert (logits(model) - expected).norm() <= 1e-5 * expected.norm(), name
        with safe_open(tmp_path / name / "model.safetensors", "pt") as file:
            assert ("lm_head.weight" not in file.keys()) == USUAL[change], name  # noqa: SIM118 - no mapping
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == USUAL[change]
