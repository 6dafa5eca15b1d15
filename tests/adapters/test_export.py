"""What is exported, adapters alone or merged, by the callback or of a checkpoint, computes what training left."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from warnings import catch_warnings, simplefilter

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from peft import PeftModel
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from lightning_automodel.checkpointing.conversion import export
from lightning_automodel.finetuning import CausalLM, HuggingFaceExport
from lightning_automodel.testing.pool import Pool
from tests.support.adapted import METHODS
from tests.support.families import tiny_model
from tests.support.marks import with_long
from tests.support.training import make_trainer

BOUND = 1e-5
QUICK = [
    ("mixtral", "experts", {"dp_shard": 2}),
    ("deepseek_v3", "experts", {"tp": 2}),
    ("phi3", "dora", {"tp": 2}),
    ("gemma3_text", "tokens", {"dp_shard": 2}),
    ("llama", "oft", {"dp_shard": 2}),
    ("llama", "randlora", {"dp_shard": 2}),
    ("llama", "vera", {"dp_shard": 2}),
]
MORE = [
    ("qwen3_moe", "experts", {"tp": 2}),
    ("gpt_oss", "experts", {"tp": 2}),
    ("glm4", "dora", {"tp": 2}),
    ("phi3", "pissa", {"tp": 2}),
    ("gpt_neox", "bias", {"tp": 2}),
    ("llama", "ends", {"tp": 2}),
    ("gemma3_text", "ends", {"tp": 2}),
    ("gemma3_text", "saved", {"dp_shard": 2}),
    ("llama", "ia3", {"tp": 2}),
    ("llama", "adalora", {"dp_shard": 2}),
    ("llama", "boft", {"dp_shard": 2}),
    ("llama", "fourierft", {"dp_shard": 2}),
    ("llama", "tokens of the head", {"dp_shard": 2}),
]
FIELDS: dict[str, dict[str, Any]] = {
    "pissa": {"target_modules": "all-linear", "init_lora_weights": "pissa"},
    "tokens of the head": {
        "target_modules": ["q_proj"],
        "trainable_token_indices": {"embed_tokens": [3], "lm_head": [5]},
    },
    "bias": {"target_modules": "all-linear", "bias": "lora_only"},
    "ia3": {"peft_type": "IA3", "r": None},
    "oft": {"peft_type": "OFT", "r": 0, "oft_block_size": 4, "target_modules": ["q_proj", "o_proj"]},
    "boft": {"peft_type": "BOFT", "r": None, "boft_block_size": 4, "target_modules": ["q_proj", "o_proj"]},
    "randlora": {"peft_type": "RANDLORA", "target_modules": ["q_proj", "o_proj"]},
    "adalora": {
        "peft_type": "ADALORA",
        "r": None,
        "init_r": 4,
        "total_step": 3,
        "target_modules": ["q_proj", "down_proj"],
    },
    "vera": {"peft_type": "VERA", "r": 4, "target_modules": ["q_proj", "down_proj"]},
    "fourierft": {"peft_type": "FOURIERFT", "r": None, "n_frequency": 20, "target_modules": ["q_proj"]},
}


def tokens(data_size: int = 1) -> DataLoader:
    ids = torch.randint(3, 128, (8, 12), generator=torch.Generator().manual_seed(1))
    return DataLoader([{"input_ids": x, "labels": x} for x in ids], batch_size=4 // data_size)  # type: ignore[arg-type]


def logits(model: Any) -> Tensor:
    """Of the first batch."""
    with torch.no_grad():
        return model.eval()(input_ids=next(iter(tokens()))["input_ids"]).logits


def trained(method: str, sizes: dict[str, int], directory: Path) -> Tensor:
    """Runs on each rank: logits after three steps, a checkpoint and both exports."""
    torch.manual_seed(3)
    given = {"r": 3, **METHODS.get(method, {}), **FIELDS.get(method, {})}
    fields = {name: value for name, value in given.items() if value is not None}
    optimizer = lambda p: torch.optim.Adam(p, lr=0.05)  # noqa: E731
    module = CausalLM(str(directory / "model"), optimizer=optimizer, lr_scheduler=None, peft=fields)
    callbacks = [
        ModelCheckpoint(dirpath=directory, filename="last", every_n_train_steps=3),
        HuggingFaceExport(str(directory / "adapter")),
        HuggingFaceExport(str(directory / "merged"), merge=True),
    ]
    trainer = make_trainer(sizes, max_steps=3, callbacks=callbacks, enable_checkpointing=True)
    trainer.fit(module, tokens(sizes.get("dp_shard", 1)))
    return logits(module.model)


def check(family: str, method: str, sizes: dict[str, int], directory: Path, pool: Pool) -> None:
    tiny_model(family).save_pretrained(directory / "model")
    expected = pool.run(trained, method, sizes, directory, trainer=True)[0]
    for merge in (False, True):
        export(str(directory / "last.ckpt"), str(directory / f"of checkpoint {merge}"), merge=merge)
    base = lambda: AutoModelForCausalLM.from_pretrained(directory / "model")  # noqa: E731
    assert relative(logits(base()), expected) > 1e-2
    for name in ("adapter", "of checkpoint False"):
        assert relative(logits(PeftModel.from_pretrained(base(), directory / name)), expected) <= BOUND, name
    for name in ("merged", "of checkpoint True"):
        whole = AutoModelForCausalLM.from_pretrained(directory / name)
        assert relative(logits(whole), expected) <= BOUND, name
        assert method != "tokens" or whole.config.tie_word_embeddings


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.slow
@pytest.mark.parametrize(("family", "method", "sizes"), with_long(QUICK, QUICK[0]))
def test_exports(family: str, method: str, sizes: dict[str, int], tmp_path: Path, pool2: Pool) -> None:
    check(family, method, sizes, tmp_path, pool2)


@pytest.mark.long
@pytest.mark.parametrize(("family", "method", "sizes"), MORE)
def test_more_exports(family: str, method: str, sizes: dict[str, int], tmp_path: Path, pool2: Pool) -> None:
    check(family, method, sizes, tmp_path, pool2)


class Beside(CausalLM):
    """Trains something beside its adapter: the last norm."""

    def configure_model(self) -> None:
        super().configure_model()
        for name, parameter in self.named_parameters():
            if name.endswith("model.norm.weight"):
                parameter.requires_grad = True


def warnings_of_export(kind: type[CausalLM], directory: Path) -> list[str]:
    """Runs on each rank: what is said when adapters are written alone."""
    module = kind(str(directory / "model"), lr_scheduler=None, peft={"r": 2, "target_modules": ["q_proj"]})
    callbacks = [
        ModelCheckpoint(dirpath=directory, filename="last", every_n_train_steps=1),
        HuggingFaceExport(str(directory / "adapter")),
    ]
    trainer = make_trainer({"tp": 2}, max_steps=1, callbacks=callbacks, enable_checkpointing=True)
    return said_by(lambda: trainer.fit(module, tokens()))


def said_by(write: Callable[[], object]) -> list[str]:
    with catch_warnings(record=True) as said:
        simplefilter("always")
        write()
    return [str(warning.message) for warning in said if "adapters are written without" in str(warning.message)]


@pytest.mark.parametrize(("kind", "times"), [(Beside, 1), (CausalLM, 0)])
def test_what_adapters_do_not_bring_along_is_said(kind: type, times: int, tmp_path: Path, pool2: Pool) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    first, second = pool2.run(warnings_of_export, kind, tmp_path, trainer=True)
    of_checkpoint = said_by(lambda: export(str(tmp_path / "last.ckpt"), str(tmp_path / "written"), merge=False))
    assert [len(said) for said in (first, second, of_checkpoint)] == [times, 0, times]
    for said in first + of_checkpoint:
        assert " 1 weights of the base" in said
        assert "model.norm.weight" in said
