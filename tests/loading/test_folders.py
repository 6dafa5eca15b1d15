"""Folders that hold more than weights: an adapter beside the base, and a model's own code."""

import json
from pathlib import Path

import pytest
import torch
from lightning import LightningModule
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from torch.optim import SGD
from transformers import AutoModelForCausalLM

from lightning_automodel.finetuning import HuggingFaceExport
from lightning_automodel.testing.pool import Pool, RankFailed
from tests.support.layouts import LAYOUTS
from tests.support.training import batches, make_trainer, tiny_llama

CODE = """
from transformers import LlamaForCausalLM

class OwnForCausalLM(LlamaForCausalLM):
    pass
"""


class Reading(LightningModule):
    """Writes what it has trained."""

    def __init__(self, directory: Path, adapter: bool = False) -> None:
        super().__init__()
        self.directory, self.adapter = directory, adapter

    def configure_model(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(self.directory / "model", trust_remote_code=True)
        if self.adapter:
            get_peft_model(self.model, LoraConfig(target_modules="all-linear"))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.model(input_ids=batch[0], labels=batch[0]).loss

    def on_train_end(self) -> None:
        if not self.adapter:
            self.model.save_pretrained(self.directory / "trained")

    def configure_optimizers(self) -> SGD:
        return SGD(self.parameters(), lr=0.1)


def train(layout: str, directory: Path, adapter: bool = False) -> None:
    """Runs on each rank."""
    exports = [HuggingFaceExport(str(directory / "exported"))]
    exports += [HuggingFaceExport(str(directory / "merged"), merge=True)] if adapter else []
    trainer = make_trainer(LAYOUTS[layout].make(), max_steps=2, callbacks=exports)
    trainer.fit(Reading(directory, adapter), batches(LAYOUTS[layout].data_size))


def write_with_code(folder: Path) -> None:
    tiny_llama(tied=False).save_pretrained(folder)
    (folder / "modeling_own.py").write_text(CODE)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["OwnForCausalLM"], "auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}}
    (folder / "config.json").write_text(json.dumps(config))


def test_an_adapter_beside_its_base_names_the_way_through_peft(tmp_path: Path, pool2: Pool) -> None:
    tiny_llama(tied=False).save_pretrained(tmp_path / "model")
    get_peft_model(tiny_llama(tied=False), LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "model")
    message = r"model holds an adapter .*PeftModel\.from_pretrained\(base, the adapter's folder\)"
    with pytest.raises(RankFailed, match=message):
        pool2.run(train, "fsdp2-tp2", tmp_path, trainer=True)


@pytest.mark.parametrize("layout", ["fsdp2-dp2", "fsdp2-tp2"])
def test_a_model_with_code_of_its_own_is_read_again(layout: str, tmp_path: Path, pool2: Pool) -> None:
    write_with_code(tmp_path / "model")
    pool2.run(train, layout, tmp_path, trainer=True)
    written = load_file(tmp_path / "trained" / "model.safetensors")
    for name in ("trained", "exported"):
        found = AutoModelForCausalLM.from_pretrained(tmp_path / name, trust_remote_code=True)
        assert type(found).__name__ == "OwnForCausalLM"
        assert all(value.equal(written[key]) for key, value in found.named_parameters())


@pytest.mark.parametrize("layout", ["fsdp2-dp2", "fsdp2-tp2"])
def test_adapters_of_a_model_with_code_of_its_own(layout: str, tmp_path: Path, pool2: Pool) -> None:
    """The class was looked for in transformers, and the export refused with a hint to use the export."""
    write_with_code(tmp_path / "model")
    pool2.run(train, layout, tmp_path, True, trainer=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", trust_remote_code=True)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", trust_remote_code=True)
    before = base.model.layers[0].self_attn.q_proj.weight.clone()
    adapted = PeftModel.from_pretrained(base, str(tmp_path / "exported")).merge_and_unload()
    assert type(merged).__name__ == "OwnForCausalLM"
    for name, value in merged.state_dict().items():
        torch.testing.assert_close(adapted.state_dict()[name], value)
    assert not torch.equal(before, merged.model.layers[0].self_attn.q_proj.weight)
