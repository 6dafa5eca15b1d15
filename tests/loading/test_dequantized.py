"""Files of MXFP4 (GPT-OSS) and FP8 (DeepSeek-V3) made bfloat16 while they are read, bit by bit as by one process."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

from lightning_automodel.checkpointing.conversion import export
from lightning_automodel.checkpointing.hugging_face.models import write_pretrained
from lightning_automodel.finetuning import CausalLM
from lightning_automodel.loading import sharded_loading
from lightning_automodel.mesh import build_mesh, resolve_sizes
from lightning_automodel.parallelizer import parallelize
from lightning_automodel.testing.pool import Pool
from tests.support.families import tiny_model
from tests.support.layouts import LAYOUTS
from tests.support.subjects import gather_part
from tests.support.training import Descending, batches, make_trainer, whole
from tests.support.weights import unequal

BLOCK = 16  # rows and columns with one scale, of FP8
FORMS: dict[str, Any] = {
    "gpt_oss": Mxfp4Config(dequantize=True),
    "deepseek_v3": FineGrainedFP8Config(dequantize=True, weight_block_size=(BLOCK, BLOCK)),
    "qwen3": FineGrainedFP8Config(dequantize=True, weight_block_size=(BLOCK, BLOCK)),  # names as in its files
}
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64}


def write(family: str, directory: Path) -> None:
    """A tiny checkpoint of the published form, of random bytes."""
    model: Any = tiny_model(family, **SIZES)
    model.save_pretrained(directory)
    generator = torch.Generator().manual_seed(0)
    quantize = mxfp4 if family == "gpt_oss" else fp8
    written: dict[str, Tensor] = {}
    for name, value in load_file(directory / "model.safetensors").items():
        written |= quantize(name, value, generator) or {name: value.to(torch.bfloat16)}
    save_file(written, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {**FORMS[family].to_dict(), "dequantize": False}
    (directory / "config.json").write_text(json.dumps(config))


def mxfp4(name: str, value: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Experts [experts, in, out]: for each of ``out`` rows blocks of 32 numbers in 16 bytes, with an exponent each."""
    if value.ndim != 3:
        return {}
    experts, width, rows = value.shape
    blocks = torch.randint(0, 256, (experts, rows, width // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(117, 124, (experts, rows, width // 32), generator=generator, dtype=torch.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}


def fp8(name: str, value: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Matrices of blocks, with a scale each, by which the numbers are multiplied."""
    if value.ndim != 2 or "proj" not in name:
        return {}
    scales = torch.rand(*(-(-size // BLOCK) for size in value.shape), generator=generator) + 0.5
    numbers = torch.randn(value.shape, generator=generator).to(torch.float8_e4m3fn)
    return {name: numbers, name.replace(".weight", ".weight_scale_inv"): scales}


def read(family: str, directory: Path) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.bfloat16, quantization_config=FORMS[family], experts_implementation="eager"
    )


def differing(family: str, sizes: dict[str, int], directory: Path) -> list[list[str]]:
    """Runs on each rank: parameters that differ, as they are read, and as plain transformers reads what is written."""
    if dist.get_rank() == 0:
        write(family, directory / "published")
    dist.barrier()
    plain: Any = read(family, directory / "published")
    mesh = build_mesh(resolve_sizes(2, **sizes), "cpu")
    with sharded_loading(lambda model: parallelize(model, mesh), torch.device("cpu")):
        model: Any = read(family, directory / "published")
    assert not model.is_quantized
    assert not hasattr(model.config, "quantization_config")
    state, is_writer = model.state_dict(), dist.get_rank() == 0
    write_pretrained(model, lambda name: whole(state[name]), directory / "written" if is_writer else None)
    dist.barrier()
    return [unequal(model, plain), unequal(AutoModelForCausalLM.from_pretrained(directory / "written"), plain)]


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"dp_shard": 2}], ids=str)
@pytest.mark.parametrize("family", FORMS)
def test_published_files_are_read_bit_by_bit(family: str, sizes: dict[str, int], pool2: Pool) -> None:
    assert pool2.run(differing, family, sizes, with_directory=True) == [[[], []]] * 2


@pytest.mark.parametrize("family", FORMS)
def test_the_form_may_be_written_in_yaml(family: str, tmp_path: Path) -> None:
    write(family, tmp_path)
    fields = {"quant_method": "mxfp4", "dequantize": True}
    if family != "gpt_oss":
        fields = {"quant_method": "fp8", "dequantize": True, "weight_block_size": [BLOCK, BLOCK]}
    module = CausalLM(str(tmp_path), model_kwargs={"quantization_config": fields, "dtype": torch.bfloat16})
    module.configure_model()
    assert unequal(module.model, read(family, tmp_path)) == []  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FORMS)
def test_what_plain_transformers_has_read_is_written_plain(family: str, tmp_path: Path) -> None:
    write(family, tmp_path / "published")
    model: Any = read(family, tmp_path / "published")
    state = model.state_dict()
    write_pretrained(model, lambda name: state[name], tmp_path / "written")
    assert unequal(AutoModelForCausalLM.from_pretrained(tmp_path / "written"), model) == []


class Reading(Descending):
    """Reads published files."""

    def __init__(self, family: str, path: Path) -> None:
        super().__init__()
        self.family, self.path = family, path

    def configure_model(self) -> None:
        if self.model is None:
            self.model = read(self.family, self.path).float()


def differing_of_megatron(family: str, path: Path) -> list[str]:
    """Runs on each rank: parameters that differ from those of plain transformers, as rank 0 sees them."""
    module = Reading(family, path)
    make_trainer(LAYOUTS["megatron3-tp2"].make()).validate(module, batches(1), verbose=False)
    plain, values = read(family, path).float(), {n: gather_part(p) for n, p in module.model.named_parameters()}
    return [n for n, p in plain.named_parameters() if dist.get_rank() == 0 and not p.equal(values[n])]  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FORMS)
def test_megatron_fsdp_reads_the_same(family: str, tmp_path: Path, pool2: Pool) -> None:
    write(family, tmp_path)
    assert pool2.run(differing_of_megatron, family, tmp_path, trainer=True) == [[], []]


class Adapting(Descending):
    """Trains an adapter, which is not zero at the start, of a base in published files."""

    def __init__(self, family: str, path: Path) -> None:
        super().__init__()
        self.family, self.path = family, path

    def configure_model(self) -> None:
        if self.model is None:
            torch.manual_seed(0)
            config = LoraConfig(r=4, target_modules=["o_proj"], init_lora_weights=False)
            self.model = get_peft_model(read(self.family, self.path), config)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.model(input_ids=batch[0], labels=batch[0]).loss


@pytest.mark.parametrize("family", FORMS)
def test_adapters_are_merged_into_what_was_read(family: str, tmp_path: Path) -> None:
    """FP8 was taken for the weights, without the scales, which have names of their own in the files."""
    write(family, tmp_path / "published")
    module = Adapting(family, tmp_path / "published")
    trainer = make_trainer({}, max_steps=1)
    trainer.fit(module, batches(1))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    for name, merge in (("adapter", False), ("merged", True)):
        export(str(tmp_path / "last.ckpt"), str(tmp_path / name), merge=merge, dtype="float32")
    base: Any = read(family, tmp_path / "published").float()
    expected: Any = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()
    assert unequal(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), expected) == []
