"""A tiny Llama of whole quantization blocks, adapted on weights of four bits, and what one process makes of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.functional import dequantize_4bit
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from lightning_automodel.distributed.shards import gather_on_rank_zero
from lightning_automodel.modules.four_bit import four_bit_layers
from tests.adapters.test_configure_model import ARGUMENTS, Adapted, errors_of_steps, lora, train_alone
from tests.support.layouts import LAYOUTS
from tests.support.training import VOCABULARY, batches, make_trainer

FIELDS: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "float32"}
DOUBLE = {"bnb_4bit_use_double_quant": True}


def llama(**changes: Any) -> LlamaForCausalLM:
    """The same weights in every process; two blocks of 64 weights in a row of attention, four in one of down_proj."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(
        **{**sizes, "num_hidden_layers": 2, "head_dim": 32, "vocab_size": VOCABULARY, "use_cache": False, **changes},
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config)


def adapt(base: nn.Module, **fields: Any) -> nn.Module:
    """LoRA on all linear layers, none of whose factors is zero."""
    return lora(base, **{"init_lora_weights": False, "lora_alpha": 2, **fields})


class FourBit(Adapted):
    """Trains adapters on a base that is quantized when it is read."""

    def __init__(self, directory: Path, adapt: Callable, fields: dict[str, Any], dtype: torch.dtype) -> None:
        super().__init__(directory, adapt, dtype)
        self.fields = fields

    def configure_model(self) -> None:
        if self.model is None:
            quantized = {"quantization_config": BitsAndBytesConfig(**self.fields)} if self.fields else {}
            base = AutoModelForCausalLM.from_pretrained(self.directory, dtype=self.kind, **quantized)
            torch.manual_seed(5)
            self.model = self.adapt(base)
            self.model.train()


def error(
    layout: str,
    directory: Path,
    fields: dict[str, Any],
    adapt: Callable = adapt,
    precision: Any = "32-true",
    dtype: torch.dtype | None = None,
    early: bool = False,
    **arguments: Any,
) -> tuple[float, str]:
    """Runs on each rank: the largest relative error of a loss or a gradient, and what has it; narrow: in one step."""
    dtype = dtype or (torch.bfloat16 if precision == "bf16-true" else torch.float32)
    expected = train_alone(FourBit(directory, adapt, fields, dtype))
    chosen = LAYOUTS[layout]
    module = FourBit(directory, adapt, fields, dtype)
    if early:
        module.configure_model()  # as __init__ would, whole on every rank
    make_trainer(chosen.make(**arguments), precision=precision, **ARGUMENTS).fit(module, batches(chosen.data_size, 32))
    assert differing_bits(module.model, expected.model) == []
    found = errors_of_steps(module, expected)
    if precision == "bf16-true":  # later, the last bit of an adapter's float32 may be one of what is computed
        found = [(value, name) for value, name in found if name in ("loss 0", "loss 1") or name.endswith("step 0")]
    return max(found)


def differing_bits(model: nn.Module, expected: nn.Module) -> list[str]:
    """Name the layers that hold other numbers than one process makes of the files; on rank 0, others name none."""
    found = []
    for name, layer, form in four_bit_layers(model):
        stored = [gather_on_rank_zero(layer.get_parameter(short)) for short in form.stored]
        if stored[0] is not None:
            one: Any = expected.get_submodule(name).weight
            numbers = dequantize_4bit(*form.from_bytes(stored[0], stored[1] if len(stored) > 1 else None))
            same = torch.equal(numbers, dequantize_4bit(one.data, one.quant_state))
            found += [] if same and numbers.dtype == one.quant_state.dtype else [name]
    return found
