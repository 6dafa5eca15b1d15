"""QLoRA from the configuration: trained, resumed elsewhere, exported, and read by plain transformers and peft."""

import logging
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from lightning_automodel import FSDP2TPStrategy
from lightning_automodel.checkpointing.conversion import export
from lightning_automodel.checkpointing.files.reading import read_checkpoint
from lightning_automodel.checkpointing.files.storage import Location
from lightning_automodel.finetuning import HuggingFaceExport
from lightning_automodel.testing.pool import Pool
from tests.finetuning.test_adapters import data_of, module_of
from tests.support.four_bit import DOUBLE, FIELDS, llama

PEFT: dict[str, Any] = {"r": 4, "target_modules": "all-linear"}
BITS = {**FIELDS, **DOUBLE}


def trainer_of(directory: Path, sizes: dict[str, int], steps: int, merge: bool = False) -> L.Trainer:
    saver = ModelCheckpoint(dirpath=directory, filename=f"{steps}", every_n_train_steps=steps)
    return L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=FSDP2TPStrategy(**sizes),
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
        callbacks=[saver, HuggingFaceExport(str(directory / "adapter"), merge=merge)],
        default_root_dir=directory,
    )


def fit(model: Path, directory: Path, sizes: dict[str, int], steps: int, resume: Path | None = None) -> float:
    """Returns the held-out loss."""
    module = module_of(model, peft=PEFT, model_kwargs={"quantization_config": BITS})
    trainer = trainer_of(directory, sizes, steps)
    data = data_of(model, directory, sizes.get("dp_shard", 1))
    trainer.fit(module, data, ckpt_path=resume)
    return float(trainer.validate(module, data, verbose=False)[0]["val/loss"])


def trained(model: Path, directory: Path) -> dict[str, Any]:
    """Runs on each rank: two steps with tp=2, two more with dp_shard=2, and all four with dp_shard=2."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning_automodel").addHandler(handler)
    before = fit(model, directory, {"tp": 2}, 2)
    logging.getLogger("lightning_automodel").removeHandler(handler)
    names = set(read_checkpoint(Location.of(directory / "2.ckpt"))["state_dict"])
    after = fit(model, directory, {"dp_shard": 2}, 4, resume=directory / "2.ckpt")
    straight = fit(model, directory / "straight", {"dp_shard": 2}, 4)
    module = module_of(model, peft=PEFT, model_kwargs={"quantization_config": BITS})
    merging, data = trainer_of(directory, {"dp_shard": 2}, 1, merge=True), data_of(model, directory, 2)
    with pytest.raises(ValueError, match=r"merge: the base .* is quantized"):
        merging.fit(module, data)
    return {"said": said, "names": names, "losses": (before, after, straight)}


def loss_of_plain_peft(model: Path, adapter: Path, directory: Path) -> float:
    """As held_out_loss, but in training mode: in evaluation bitsandbytes computes in bfloat16 on some CPUs."""
    config = BitsAndBytesConfig(**BITS)
    base = AutoModelForCausalLM.from_pretrained(model, quantization_config=config)
    adapted, data, losses = PeftModel.from_pretrained(base, adapter).train(), data_of(model, directory), []
    data.setup("validate")
    for batch in data.val_dataloader():
        targets = int((batch["labels"][:, 1:] != -100).sum())
        losses.append((float(adapted(**batch, use_cache=False).loss.detach()) * targets, targets))
    return sum(loss for loss, _ in losses) / sum(count for _, count in losses)


@pytest.mark.long  # its parts run apart, in tests/adapters
def test_from_training_to_plain_peft(model_dir: Path, tmp_path: Path, pool2: Pool) -> None:
    model = tmp_path / "model"
    llama(vocab_size=320).save_pretrained(model)
    AutoTokenizer.from_pretrained(model_dir).save_pretrained(model)
    (tmp_path / "straight").mkdir()
    found = pool2.run(trained, model, tmp_path, trainer=True, timeout=200.0)[0]
    whole = sum(p.numel() for p in llama(vocab_size=320).parameters())
    factors = 2 * 4 * (2 * (128 + 128) + 2 * (128 + 64) + 3 * (128 + 256))
    said = " ".join(found["said"])
    assert f"{factors:,} of {whole + factors:,} parameters train" in said
    assert f"{whole + factors:,}, {factors:,} train" in said
    assert [n for n in found["names"] if "lora_" not in n and not n.startswith("metrics")] == []
    before, after, straight = found["losses"]
    assert after == pytest.approx(straight, rel=1e-5)
    assert abs(after - before) > 1e-2
    export(str(tmp_path / "4.ckpt"), str(tmp_path / "from checkpoint"))
    for name in ("adapter", "from checkpoint"):
        assert loss_of_plain_peft(model, tmp_path / name, tmp_path) == pytest.approx(after, abs=1e-4), name
    with pytest.raises(ValueError, match=r"merge: the base .* use PeftModel\.from_pretrained"):
        export(str(tmp_path / "4.ckpt"), str(tmp_path / "merged"), merge=True)
