"""Adapters on a base of four bits: every gradient of every factor is that of bitsandbytes and peft on one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from lightning_automodel import FSDP2Config
from lightning_automodel.distributed.shards import local_tensor
from lightning_automodel.modules.four_bit import four_bit_layers
from lightning_automodel.testing.pool import Pool
from tests.support.four_bit import DOUBLE, FIELDS, FourBit, adapt, error, llama
from tests.support.training import batches, make_trainer

BOUND = 1e-5
SECONDS = 240.0
Case = tuple[str, dict[str, Any], dict[str, Any]]
"""A layout, changes of the quantization, and arguments of the strategy."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    llama().save_pretrained(path)
    return path


def errors(directory: Path, cases: list[Case]) -> list[tuple[float, str]]:
    """Runs on each rank."""
    return [error(layout, directory, {**FIELDS, **fields}, **arguments) for layout, fields, arguments in cases]


def check(pool: Pool, directory: Path, cases: list[Case]) -> None:
    for found in pool.run(errors, directory, cases, trainer=True, timeout=SECONDS):
        for case, largest in zip(cases, found, strict=True):
            assert largest[0] <= BOUND, (case, largest)


def for_training(base: Any) -> Any:
    """What peft's guide to QLoRA does."""
    return adapt(prepare_model_for_kbit_training(base, gradient_checkpointing_kwargs={"use_reentrant": False}))


def scaled(base: Any) -> Any:
    return get_peft_model(base, IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]))


SEQUENCE = {"config": FSDP2Config(sequence_parallel=True, activation_checkpointing=True)}
COMPILED = {"config": FSDP2Config(enable_compile=True, compile_backend="aot_eager")}
NARROW = {"bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "bfloat16"}
ON_TWO: list[Case] = [
    ("ddp-2", {**DOUBLE, **NARROW}, {"precision": "bf16-true"}),
    ("fsdp2-dp2", DOUBLE, {}),
    ("fsdp2-tp2", {}, SEQUENCE),
]
MORE: dict[str, Case] = {
    "fp4": ("fsdp2-tp2", {"bnb_4bit_quant_type": "fp4", **DOUBLE}, {}),
    "compiled": ("fsdp2-dp2", DOUBLE, COMPILED),
    "compiled columns": ("fsdp2-tp2", {}, COMPILED),
    "recomputed": ("fsdp2-dp2", DOUBLE, {"config": FSDP2Config(activation_checkpointing=True)}),
    "narrow": ("fsdp2-dp2", {**DOUBLE, **NARROW}, {"precision": "bf16-true"}),
    "context": ("fsdp2-cp2", DOUBLE, {}),
    "ia3": ("fsdp2-tp2", {}, {"adapt": scaled}),
    "built early": ("fsdp2-tp2", DOUBLE, {"early": True}),
    "replicas that receive": ("fsdp2-dp2", DOUBLE, {"dp_shard": 1, "dp_replicate": 2}),
}


@pytest.mark.slow
def test_two_ranks(directory: Path, pool2: Pool) -> None:
    check(pool2, directory, ON_TWO)


@pytest.mark.long
@pytest.mark.parametrize("name", MORE)
def test_more_on_two_ranks(name: str, directory: Path, pool2: Pool) -> None:
    check(pool2, directory, [MORE[name]])


def errors_of_files(directory: Path) -> list[tuple[float, str]]:
    """Runs on each rank: files of four bits, and narrow files for peft's guide to QLoRA."""
    narrow = {"adapt": for_training, "dtype": torch.bfloat16}
    return [
        error("fsdp2-tp2", directory / "four bits", {}),
        error("fsdp2-dp2", directory / "narrow", {**FIELDS, **DOUBLE}, **narrow),
    ]


@pytest.mark.slow
def test_files(directory: Path, pool2: Pool) -> None:
    config = BitsAndBytesConfig(**FIELDS, **DOUBLE)
    quantized = AutoModelForCausalLM.from_pretrained(directory, quantization_config=config)
    quantized.save_pretrained(directory / "four bits")
    llama().to(torch.bfloat16).save_pretrained(directory / "narrow")
    for found in pool2.run(errors_of_files, directory, trainer=True):
        assert max(found)[0] <= BOUND, found


@pytest.mark.long
def test_blocks_across_rows(tmp_path: Path, pool2: Pool) -> None:
    llama(hidden_size=96).save_pretrained(tmp_path)
    check(pool2, tmp_path, [("fsdp2-dp2", DOUBLE, {})])


@pytest.mark.long
def test_four_ranks(directory: Path, pool4: Pool) -> None:
    check(pool4, directory, [("fsdp2-dp2-tp2", DOUBLE, {})])


def held(directory: Path) -> tuple[int, int]:
    """Runs on each rank: bytes of weights of four bits that it holds after training, and that there are."""
    module = FourBit(directory, adapt, {**FIELDS, **DOUBLE}, torch.float32)
    make_trainer({"dp_shard": 2}, max_steps=1).fit(module, batches(2))
    stored = [layer.get_parameter(name) for _, layer, form in four_bit_layers(module) for name in form.stored]
    return sum(local_tensor(p).untyped_storage().nbytes() for p in stored), sum(p.nbytes for p in stored)


def test_a_rank_holds_its_shard(directory: Path, pool2: Pool) -> None:
    model, of_groups = llama(), 2 * (4 * 2 + 3 * 3) * 4  # two layers, one group per 256 blocks, and an offset
    weights = sum(p.numel() for name, p in model.model.layers.named_parameters() if name.endswith("proj.weight"))
    for mine, whole in pool2.run(held, directory, trainer=True):
        assert whole == weights // 64 * 33 + of_groups
        assert whole / 2 <= mine <= whole / 2 + of_groups
