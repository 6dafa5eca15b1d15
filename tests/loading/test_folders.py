"""Folders that hold more than weights: an adapter beside the base, and a model's own code."""

import json
from pathlib import Path

import pytest
from lightning import LightningModule
from peft import LoraConfig, get_peft_model
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

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory

    def configure_model(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(self.directory / "model", trust_remote_code=True)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.model(input_ids=batch[0], labels=batch[0]).loss

    def on_train_end(self) -> None:
        self.model.save_pretrained(self.directory / "trained")

    def configure_optimizers(self) -> SGD:
        return SGD(self.parameters(), lr=0.1)


def train(layout: str, directory: Path) -> None:
    """Runs on each rank."""
    exports = [HuggingFaceExport(str(directory / "exported"))]
    trainer = make_trainer(LAYOUTS[layout].make(), max_steps=2, callbacks=exports)
    trainer.fit(Reading(directory), batches(LAYOUTS[layout].data_size))


def test_an_adapter_beside_its_base_names_the_way_through_peft(tmp_path: Path, pool2: Pool) -> None:
    tiny_llama(tied=False).save_pretrained(tmp_path / "model")
    get_peft_model(tiny_llama(tied=False), LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "model")
    message = r"model holds an adapter .*PeftModel\.from_pretrained\(base, the adapter's folder\)"
    with pytest.raises(RankFailed, match=message):
        pool2.run(train, "fsdp2-tp2", tmp_path, trainer=True)


@pytest.mark.parametrize("layout", ["fsdp2-dp2", "fsdp2-tp2"])
def test_a_model_with_code_of_its_own_is_read_again(layout: str, tmp_path: Path, pool2: Pool) -> None:
    tiny_llama(tied=False).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "modeling_own.py").write_text(CODE)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config |= {"architectures": ["OwnForCausalLM"], "auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    pool2.run(train, layout, tmp_path, trainer=True)
    written = load_file(tmp_path / "trained" / "model.safetensors")
    for name in ("trained", "exported"):
        found = AutoModelForCausalLM.from_pretrained(tmp_path / name, trust_remote_code=True)
        assert type(found).__name__ == "OwnForCausalLM"
        assert all(value.equal(written[key]) for key, value in found.named_parameters())
