"""Quantized bases that were not compared with one process are refused before training, wherever they are built."""

from pathlib import Path
from typing import Any

import peft
import pytest
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

from lightning_automodel.testing.pool import Pool
from tests.support.four_bit import DOUBLE, FIELDS, adapt, llama
from tests.support.layouts import LAYOUTS
from tests.support.training import Recorder, batches, make_trainer, tiny_llama


class Quantized(Recorder):
    def __init__(self, directory: Path, config: Any, adapt: Any = lambda base: base) -> None:
        super().__init__()
        self.directory, self.config, self.adapt = directory, config, adapt

    def configure_model(self) -> None:
        self.model = self.adapt(AutoModelForCausalLM.from_pretrained(self.directory, quantization_config=self.config))


def refusal(layout: str, module: Recorder) -> str:
    """Runs on each rank."""
    with pytest.raises(ValueError, match=r"\S") as error:
        make_trainer(LAYOUTS[layout].make(), max_steps=1).fit(module, batches(LAYOUTS[layout].data_size))
    assert module.losses == []
    return str(error.value)


def refusals_of_integers(directory: Path) -> list[str]:
    """Runs on each rank: under tp, and under dp_shard where __init__ builds."""
    from torchao.quantization import Int8WeightOnlyConfig

    config = TorchAoConfig(Int8WeightOnlyConfig())
    built = Quantized(directory, config)
    built.configure_model()
    built.configure_model = lambda: None  # type: ignore[method-assign]
    return [refusal("fsdp2-tp2", Quantized(directory, config)), refusal("fsdp2-dp2", built)]


def test_integers_are_refused(tmp_path: Path, pool2: Pool) -> None:
    tiny_llama(tied=False).save_pretrained(tmp_path)
    for found in pool2.run(refusals_of_integers, tmp_path, trainer=True):
        assert len(found) == 2
        for message in found:
            assert "LlamaForCausalLM is quantized (torchao)" in message
            assert "quantize by BitsAndBytesConfig(load_in_4bit=True), load it without quantization_config" in message


def vera(base: nn.Module) -> nn.Module:
    return peft.get_peft_model(base, peft.VeraConfig(r=4, target_modules=["q_proj"]))


REFUSED: dict[str, tuple[str, str, dict[str, Any], Any, list[str]]] = {
    "eight bits": ("fsdp2-dp2", "whole", {"load_in_8bit": True}, None, ["(bitsandbytes, eight bits)", "load_in_4bit"]),
    "megatron": ("megatron3-dp2", "whole", FIELDS, adapt, ["(bitsandbytes, four bits)", "use FSDP2TPStrategy"]),
    "columns": (
        *("fsdp2-tp2", "three blocks", {**FIELDS, **DOUBLE}, adapt),
        ["blocks of 64 weights with one scale in a row of model.layers.*.mlp.down_proj=3", "use one of 1"],
    ),
    "rows": (
        *("fsdp2-tp2", "half a block", FIELDS, adapt),
        ["in_features=96, no multiple of 64", "use tp=1 with dp_shard", "llm_int8_skip_modules"],
    ),
    "vera": ("ddp-2", "whole", FIELDS, vera, ["vera_lambda", "quantized to four bits", "use LoRA without"]),
}
"""Layout, model, quantization, adapters, and what the message says."""


def messages(directory: Path) -> dict[str, str]:
    """Runs on each rank."""
    found = {}
    for name, (layout, model, fields, change, _) in REFUSED.items():
        config = BitsAndBytesConfig(**fields)
        found[name] = refusal(layout, Quantized(directory / model, config, change or (lambda base: base)))
    return found


def test_what_was_not_compared_is_refused(tmp_path: Path, pool2: Pool) -> None:
    llama().save_pretrained(tmp_path / "whole")
    llama(hidden_size=96).save_pretrained(tmp_path / "half a block")
    llama(intermediate_size=192).save_pretrained(tmp_path / "three blocks")
    for found in pool2.run(messages, tmp_path, trainer=True, timeout=240.0):
        for name, (*_, parts) in REFUSED.items():
            assert [part for part in parts if part not in found[name]] == [], (name, found[name])
