"""``save_pretrained`` of peft's models from a user's hook: plain peft reads what any layout wrote, bit by bit."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, ConvNextConfig, ConvNextForImageClassification

from lightning_automodel.finetuning import HuggingFaceExport
from lightning_automodel.testing.pool import Nursery, Pool
from tests.adapters.test_configure_model import Adapted, lora
from tests.support.layouts import LAYOUTS
from tests.support.marks import with_long
from tests.support.subjects import gather_part
from tests.support.training import Recorder, batches, make_trainer, rows, tiny_llama

METHODS: dict[str, dict[str, Any]] = {
    "plain": {"init_lora_weights": False},
    "saved": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "input_layernorm"], "bias": "all"},
    "ends": {"target_modules": ["embed_tokens", "lm_head", "q_proj"], "init_lora_weights": False},
}


class Saving(Adapted):
    """Saves in the middle of a step, with and without a second adapter."""

    def __init__(self, directory: Path, method: str) -> None:
        super().__init__(directory, partial(two, **METHODS[method]), keeps_gradients=False)
        self.target = directory / method
        self.expected: dict[str, Tensor | None] = {}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 1:
            self.model.save_pretrained(self.target)
            self.model.save_pretrained(self.target / "one", selected_adapters=["default"], save_embedding_layers=True)
            self.expected = {name: gather_part(p) for name, p in self.model.named_parameters()}
        return super().training_step(batch, batch_idx)


def two(base: nn.Module, **fields: Any) -> nn.Module:
    model: Any = lora(base, **fields)
    model.add_adapter("other", LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False))
    return model


def save(layout: str, directory: Path) -> dict[str, dict[str, Tensor | None]]:
    """Runs on each rank."""
    found = {}
    for method in METHODS:
        module = Saving(directory, method)
        make_trainer(LAYOUTS[layout].make(), max_steps=2).fit(module, batches(LAYOUTS[layout].data_size))
        found[method] = module.expected
    return found


HERE = ("fsdp2-dp2", "fsdp2-tp2", "fsdp2-dp2-tp2", "megatron3-dp2")


@pytest.mark.slow
@pytest.mark.parametrize("layout", with_long(HERE, "fsdp2-tp2", "fsdp2-dp2-tp2"))
def test_peft_reads_what_was_written(layout: str, nursery: Nursery, tmp_path: Path) -> None:
    tiny_llama(tied=False).save_pretrained(tmp_path)
    saved = Pool(nursery, LAYOUTS[layout].ranks).run(save, layout, tmp_path, trainer=True)[0]
    for method, expected in saved.items():
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path), tmp_path / method)
        model.load_adapter(str(tmp_path / method / "other"), "other")
        values = dict(model.named_parameters())
        assert values.keys() == expected.keys()
        assert [key for key, value in values.items() if not value.equal(expected[key])] == [], method
        one = load_file(tmp_path / method / "one" / "adapter_model.safetensors")
        assert any("embed_tokens" in name for name in one)
        assert not any("k_proj.weight" in name or "other" in name for name in one)
        config = json.loads((tmp_path / method / "adapter_config.json").read_text())
        assert config["auto_mapping"]["base_model_class"] == "LlamaForCausalLM"


def save_otherwise(directory: Path) -> str:
    """Runs on each rank."""
    module = Saving(directory, "plain")
    make_trainer({}, max_steps=2).fit(module, batches(2))
    with pytest.raises(ValueError, match="path_initial_model_for_weight_conversion") as refusal:
        module.model.save_pretrained(directory / "x", path_initial_model_for_weight_conversion="x")
    return str(refusal.value)


def test_a_conversion_of_adapters_is_refused(tmp_path: Path, nursery: Nursery) -> None:
    tiny_llama(tied=False).save_pretrained(tmp_path)
    for message in Pool(nursery, 2).run(save_otherwise, tmp_path, trainer=True):
        assert "convert in one process" in message


class Prompted(Adapted):
    """Saves a prompt that an encoder computes."""

    def on_train_end(self) -> None:
        self.model.save_pretrained(self.directory / "prompt")


def prompt(base: nn.Module) -> nn.Module:
    sizes = {"num_virtual_tokens": 3, "prefix_projection": True, "encoder_hidden_size": 8}
    return peft.get_peft_model(base, peft.PrefixTuningConfig(task_type="CAUSAL_LM", **sizes))  # type: ignore[arg-type]


def save_prompt(directory: Path) -> tuple[Tensor, str]:
    """Runs on each rank: logits after training, and what refuses to export the model below the prompt."""
    module = Prompted(directory, prompt, keeps_gradients=False)
    make_trainer({}, max_steps=2).fit(module, batches(2))
    with torch.no_grad():
        logits = module.model.eval()(input_ids=rows(2)).logits
    export = HuggingFaceExport(str(directory / "x"), merge=True)
    with pytest.raises(ValueError, match="what PrefixTuningConfig learns stands before the model") as refusal:
        make_trainer({}, max_steps=1, callbacks=[export]).fit(module, batches(2))
    return logits, str(refusal.value)


def test_a_prompt_that_is_computed_is_saved(tmp_path: Path, pool2: Pool) -> None:
    tiny_llama(tied=False).save_pretrained(tmp_path)
    expected, refusal = pool2.run(save_prompt, tmp_path, trainer=True)[0]
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path), tmp_path / "prompt").eval()
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=rows(2)).logits, expected)
    assert "leave merge out: PeftModel.from_pretrained reads the prompt" in refusal


class Convolved(Recorder):
    """Adapts convolutions of a model that says nothing of embeddings, and saves."""

    directory: Path

    def configure_model(self) -> None:
        if self.model is None:
            base = ConvNextForImageClassification.from_pretrained(self.directory)
            self.model = peft.get_peft_model(base, LoraConfig(r=2, target_modules=["patch_embeddings", "pwconv1"]))

    def loss(self, batch: list[Tensor]) -> Tensor:
        images = batch[0][:, :1, None, None].float().expand(-1, 3, 32, 32)
        return self.model(pixel_values=images, labels=batch[0][:, 1] % 2).loss

    def on_train_end(self) -> None:
        self.model.save_pretrained(self.directory / "saved")


def save_convolutions(directory: Path) -> dict[str, Tensor | None]:
    """Runs on each rank."""
    module = Convolved()
    module.directory = directory
    make_trainer({}, max_steps=2).fit(module, batches(2))
    return {name: gather_part(p) for name, p in module.model.named_parameters()}


def test_adapters_of_a_model_without_embeddings_are_saved(tmp_path: Path, pool2: Pool) -> None:
    config = ConvNextConfig(hidden_sizes=[4, 8], depths=[1, 1], num_stages=2, image_size=32)
    ConvNextForImageClassification(config).save_pretrained(tmp_path)
    expected = pool2.run(save_convolutions, tmp_path, trainer=True)[0]
    model = PeftModel.from_pretrained(ConvNextForImageClassification.from_pretrained(tmp_path), tmp_path / "saved")
    assert [name for name, value in model.named_parameters() if not value.equal(expected[name])] == []
